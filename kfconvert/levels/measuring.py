"""Runs a lesson: each level is checked against float64, then all that are right are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..accuracy import Reference, compare, one_line
from ..inputs import ExampleCall
from ..json_values import json_ready
from ..profiling import KernelProfiler, Measurement, Speedup, count_operators
from . import SIZES
from .definition import Function, Lesson, Level, lesson

WARMUP, REPEAT = 3, 30
# Errors of so much of the result's largest value pass in any case: they are of the order in which float32 is summed up.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class LevelResult:
    """What became of one level.

    missing: why it cannot run here; problem: what went wrong, a failure or a wrong result. Both are None where it was
    timed, and then the rest is there.
    error: largest difference from the float64 run, relative to the largest value of that.
    measurement: times, bandwidth and, on CUDA, launches and the peak of memory.
    speedup: over the first level that ran; None for that itself.
    operators: calls of PyTorch's operators, see ``kfconvert.profiling.count_operators``.
    """

    name: str
    missing: str | None = None
    problem: str | None = None
    error: float | None = None
    measurement: Measurement | None = None
    speedup: Speedup | None = None
    operators: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        measurement = self.measurement and self.measurement.as_dict()
        return {**vars(self), "measurement": measurement, "speedup": self.speedup and self.speedup.as_dict()}


@dataclass(frozen=True)
class LessonResult:
    """A lesson as it went on one device, with inputs of one size, which ``sizes`` tells in numbers."""

    lesson: Lesson
    device: str
    size: str
    sizes: Mapping[str, int]
    levels: tuple[LevelResult, ...]

    @property
    def problems(self) -> list[str]:
        """A line for each level that failed or gave a wrong result."""
        return [f"{self.lesson.name}, {level.name}: {level.problem}" for level in self.levels if level.problem]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        told = {"lesson": self.lesson.name, "formula": self.lesson.formula, "learned": self.lesson.learned}
        of_run = {"device": self.device, "size": self.size, "sizes": self.sizes}
        return json_ready({**told, **of_run, "levels": [level.as_dict() for level in self.levels]})


@torch.no_grad()
def run(name: str, device: torch.device | str = "cpu", size: str = "small") -> LessonResult:
    """Check and time the levels of the lesson ``name`` on ``device``, in float32.

    size: "small", which takes a CPU less than a second besides what is compiled, or "full", which keeps a GPU busy.
    A level that the device cannot run, fails, or gives a wrong result is told and not timed.

    Raises:
        ValueError: there is no such lesson or size.
    """
    device = torch.device(device)
    if size not in SIZES:
        raise ValueError(f"no size {size!r}: there are {' and '.join(SIZES)}")
    taken = lesson(name)
    generator = torch.Generator(device).manual_seed(0)
    args = taken.inputs(partial(_normal, generator), **taken.sizes[size])
    wide = ExampleCall(args).map_tensors(Tensor.double).args
    truth = Reference(taken.native(*wide), "float64 run")
    plain = taken.native(*args)
    results, functions = {}, {}
    for level in taken.levels(device):
        results[level.name] = LevelResult(level.name, missing=level.missing)
        if level.missing is None:
            results[level.name], function = _checked(level, args, truth, plain)
            if function is not None:
                functions[level.name] = function
    for row in KernelProfiler().compare_implementations(functions, args=args, warmup=WARMUP, repeat=REPEAT):
        results[row.name] = LevelResult(
            row.name,
            error=results[row.name].error,
            measurement=row.measurement,
            speedup=row.speedup,
            operators=count_operators(partial(functions[row.name], *args)),
        )
    return LessonResult(taken, str(device), size, taken.sizes[size], tuple(results.values()))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _checked(
    level: Level, args: tuple[Any, ...], truth: Reference, plain: Tensor
) -> tuple[LevelResult, Function | None]:
    """The level's result before it is timed, and its function where that is right."""
    try:
        function: Callable[..., Tensor] = level.build()
        outputs = function(*args)
    except Exception as error:  # a compiler or a kernel may fail in its own way; the other levels are to be seen
        return LevelResult(level.name, problem=f"failed: {one_line(error)}"), None
    verdict = compare(truth, plain, outputs, TOLERANCE)
    difference = None if verdict.optimized_error is None else verdict.optimized_error.max_rel
    if not verdict.passed:
        return LevelResult(level.name, problem=verdict.reason, error=difference), None
    return LevelResult(level.name, error=difference), function
