"""Runs a lesson: checks each level against float64, then times all correct levels in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfconvert.accuracy import Reference, compare, one_line
from kfconvert.inputs import ExampleCall
from kfconvert.profiling import KernelProfiler, Measurement, Speedup

from .definition import SIZES, Function, Lesson, Level, lesson

WARMUP, REPEAT = 3, 30
# Errors up to this fraction of the result's largest value always pass, because the order of float32 sums causes them.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class LevelResult:
    """The result of one level.

    missing: why the level cannot run here; problem: a failure or a wrong result. Both are None if the level was timed;
    the other fields are set then.
    error: largest difference from the float64 run, relative to its largest value.
    measurement: times, bandwidth and, on CUDA, launches and peak memory.
    speedup: speed-up over the first level that ran; None for the first level.
    """

    name: str
    missing: str | None = None
    problem: str | None = None
    error: float | None = None
    measurement: Measurement | None = None
    speedup: Speedup | None = None


@dataclass(frozen=True)
class LessonResult:
    """The result of a lesson on one device, with inputs of one size; ``sizes`` has the numbers."""

    lesson: Lesson
    device: str
    size: str
    sizes: Mapping[str, int]
    levels: tuple[LevelResult, ...]

    @property
    def problems(self) -> list[str]:
        """Returns a line for each level that failed or had a wrong result."""
        return [f"{self.lesson.name}, {level.name}: {level.problem}" for level in self.levels if level.problem]


@torch.no_grad()
def run(name: str, device: torch.device | str = "cpu", size: str = "small") -> LessonResult:
    """Checks and times the levels of the lesson ``name`` on ``device``, in float32.

    size: "small" (less than a second on a CPU, without compilation) or "full" (utilizes a GPU). A level that the device
    cannot run, that fails, or that has a wrong result is reported and not timed.

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
        )
    return LessonResult(taken, str(device), size, taken.sizes[size], tuple(results.values()))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _checked(
    level: Level, args: tuple[Any, ...], truth: Reference, plain: Tensor
) -> tuple[LevelResult, Function | None]:
    """The level's result before timing, and its function if it is correct."""
    try:
        function: Callable[..., Tensor] = level.build()
        outputs = function(*args)
    except Exception as error:  # a compiler or kernel may raise anything; the other levels continue
        return LevelResult(level.name, problem=f"failed: {one_line(error)}"), None
    verdict = compare(truth, plain, outputs, TOLERANCE)
    difference = None if verdict.optimized_error is None else verdict.optimized_error.max_rel
    if not verdict.passed:
        return LevelResult(level.name, problem=verdict.reason, error=difference), None
    return LevelResult(level.name, error=difference), function
