"""``kfconvert bench``: times models in eager mode, with ``torch.compile`` and converted, in one process.

Functions import torch when they need it, as in ``jobs``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..folders import expanded
from ..json_values import json_ready
from . import terminal
from .jobs import Jobs

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from ..inputs import ExampleCall

# Limits of timing, per model and batch size.
SECONDS = 10.0

Progress = Callable[[str, int, int], None]


class _Subject(NamedTuple):
    """A model to time: the original, the call, and the function that converts the model."""

    original: nn.Module
    call: ExampleCall
    convert: Callable[[], nn.Module]


@dataclass
class Bench:
    """One call of ``kfconvert bench``.

    Args:
        jobs: device, dtype, weights, inputs and options of the conversion.
        batch_sizes: batch sizes for each model; if empty, the model's default inputs are used.
        dtype: the dtype that the user named, if any. Artifacts with another dtype raise an error.
        compiles: whether to time ``torch.compile`` as well.
        trust_source: whether to run code that artifacts name.
    """

    jobs: Jobs
    batch_sizes: Sequence[int]
    dtype: str | None
    compiles: bool
    trust_source: bool

    def run(self, names: Sequence[str], say_error: Callable[[str], None]) -> list[dict[str, Any]]:
        """Times models by name, artifacts, and artifacts in folders. A failure of one does not stop the others.

        Args:
            say_error: called with one line for each model and batch size that failed.

        Returns:
            for each model and batch size {"name", "batch_size", "inputs", "error", "candidates", "timings",
            "speedup_over_compile", "environment", "notes"}, ready for JSON. Unknown values are None. ``error`` is None
            if the original and the converted model were timed. ``candidates`` has the fields of
            ``profiling.Candidate``, and ``timings`` is from ``profiling.Comparison.as_dict``.

        Raises:
            click.ClickException: the device does not exist, or it cannot compute in the dtype.
        """
        subjects = [(name, folder) for given in names for name, folder in _subjects(given)]
        results = []
        with self.jobs.ready(name for name, _ in subjects):
            for name, folder in subjects:
                for batch_size in self.batch_sizes or (None,):
                    unknown = ("inputs", "error", "candidates", "timings", "speedup_over_compile", "environment")
                    result: dict[str, Any] = {
                        "name": name,
                        "batch_size": batch_size,
                        **dict.fromkeys(unknown),
                        "notes": [],
                    }
                    try:
                        self._time(result, name, folder)
                    except click.ClickException as error:
                        result["error"] = error.message
                        say_error(error.message)
                    results.append(result)
        return results

    def _time(self, result: dict[str, Any], name: str, folder: Path | None) -> None:
        """Fills in the ``result`` of one model at one batch size. Raises click.ClickException with one line."""
        from ..profiling import release

        try:
            with self.jobs.failing_in_one_line(name), terminal.progress_bar(name) as progress:
                progress("load", 0, 1)
                size = result["batch_size"]
                subject = self._artifact(folder, size) if folder else self._model(name, size, progress)
                result |= self._timed(name, subject, progress)
        finally:
            release(self.jobs.device)

    def _timed(self, name: str, subject: _Subject, progress: Progress) -> dict[str, Any]:
        import torch

        from ..accuracy import reference_outputs
        from ..conversion import ConversionError, first_line
        from ..profiling import COMPILED, CONVERTED, EAGER, bytes_of, compare_candidates, compiled, environment

        original, call, convert = subject
        made: list[Any] = []

        def converted() -> tuple[Callable[[], Any], dict[str, int]]:
            made.append(convert())
            return partial(call, made[0]), {"sites": made[0].kfconvert_info()["total_replaced"]}

        ways: dict[str, Callable[[], Any]] = {EAGER: lambda: (partial(call, original), None)}
        if self.compiles:
            ways[COMPILED] = lambda: (compiled(original, call), None)
        ways[CONVERTED] = converted
        device = next((tensor.device for tensor in call.tensors()), self.jobs.device)
        try:
            reference = reference_outputs(original, call.args, call.kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code may raise anything
            reason = f"{type(original).__name__} does not accept {call.summary()}: {first_line(error)}"
            raise ConversionError(reason) from error
        found, timings = compare_candidates(
            ways.items(), reference, device, SECONDS, lambda stage: progress(stage, 0, 1)
        )
        for candidate in found:
            if candidate.failure and candidate.name != COMPILED:
                raise click.ClickException(f"{name}: {candidate.failure}")
        assert timings is not None
        if found[-1].extra_bytes is not None:  # the converted model is a copy
            found[-1].extra_bytes -= bytes_of([*made[0].parameters(), *made[0].buffers()])
        over = timings.speedup(CONVERTED, COMPILED).as_dict() if COMPILED in timings else None
        rows = next((tensor.shape[0] for tensor in call.tensors() if tensor.dim() > 0), None)
        return json_ready(
            {
                "batch_size": rows,
                "inputs": call.summary(),
                "candidates": [dataclasses.asdict(candidate) for candidate in found],
                "timings": timings.as_dict(),
                "speedup_over_compile": over,
                "environment": environment(device),
                "notes": _notes(found, made[0]),
            }
        )

    def _model(self, name: str, batch_size: int | None, progress: Progress) -> _Subject:
        jobs, shape = self.jobs, self._shape(batch_size)
        entry = jobs.resolved(name)
        call = self._call(entry.model, entry.example_inputs, batch_size, None, jobs.device, jobs.dtype)

        def convert() -> nn.Module:
            inputs = {"input_shape": shape} if shape else {"example_inputs": call.kwargs or call.args}
            return jobs.converter.convert_model(entry.model, **inputs, device=jobs.device, progress=progress)

        return _Subject(entry.model, call, convert)

    def _artifact(self, folder: Path, batch_size: int | None) -> _Subject:
        from .. import artifact

        device = None if self.jobs.device_name == "auto" else self.jobs.device
        try:
            original, inputs = artifact.load_original(folder, device, self.trust_source)
        except artifact.ArtifactError as error:
            hint = " (here: --trust-source)" if "trust_source=True" in str(error) else ""
            raise click.ClickException(f"{error}{hint}") from error
        tensors = [*original.parameters(), *original.buffers()]
        place = tensors[0].device if tensors else self.jobs.device
        own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        if self.dtype and own and str(own) != f"torch.{self.dtype}":
            raise click.ClickException(f"{folder} is in {own}: --dtype is for models by name".replace("torch.", ""))
        call = self._call(original, inputs, batch_size, self.jobs.sizes["seq_len"], place, own)
        return _Subject(original, call, lambda: artifact.load(folder, device=device, trust_source=self.trust_source))

    def _call(
        self, model: nn.Module, inputs: Any, batch_size: int | None, seq_len: int | None, device: Any, dtype: Any
    ) -> ExampleCall:
        """The call to time: with the shape that the user named, or with ``inputs`` in these sizes."""
        from ..inputs import example_call, resized

        shape = self._shape(batch_size)
        call = example_call(model, shape, None if shape else inputs, device, dtype)
        return call if shape else resized(call, batch_size, seq_len)

    def _shape(self, batch_size: int | None) -> tuple[int, ...] | None:
        """The shape of the single input, if the user named one."""
        shape = self.jobs.input_shape
        return shape if shape is None or batch_size is None else (batch_size, *shape[1:])


def _subjects(given: str) -> list[tuple[str, Path | None]]:
    """The artifacts that ``given`` names, each with its folder, or a model name."""
    if os.path.isdir(expanded(given)):
        from ..artifact import ArtifactError, artifacts_in

        with contextlib.suppress(ArtifactError):
            return [(str(folder), folder) for folder in artifacts_in(given)]
    return [(given, None)]


def _notes(found: Sequence[Any], model: Any) -> list[str]:
    from ..report import given_back

    info = model.kfconvert_info()
    notes = [f"{each.name} was not timed: {each.failure}" for each in found if each.failure]
    notes += [f"{each.name} is less accurate than eager: {each.inaccurate}" for each in found if each.inaccurate]
    if reason := given_back(info):
        notes.append(f"kfconvert returned the original, which is timed instead of a converted model: {reason}")
    misses = info["guard"]["misses"]
    if sum(misses.values()) > info["guard"]["hits"]:
        notes.append(f"the converted model runs its original forward: {max(misses, key=misses.get)}")
    return notes
