"""Comparison of implementations of a function: times, speed-ups, and agreement of outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..accuracy import Reference, compare
from ..inputs import ExampleCall
from ..json_values import json_ready
from .bandwidth import tensors_of
from .benchmarks import call_of, check, measure
from .comparison import Speedup
from .measurement import Measurement, bytes_text, time_text
from .plot import bar_chart

# Text columns in the table of `KernelProfiler.summary`.
WIDTH = 120


@dataclasses.dataclass(frozen=True)
class ImplementationResult:
    """An implementation compared with the first one.

    `speedup`: speed-up over the first, None for the first itself. `difference`: largest difference from the outputs of
    the first, relative to the largest value of that output; None if they cannot be compared. `agrees`: whether outputs
    have equal structure, shapes and dtypes, and differ by at most 1e-6 and 4 rounding units of their dtype. Integers,
    bools and the positions of NaN and infinities must be equal. Sparse tensors are compared as dense ones. None if
    nothing could be compared.
    `reason`: one line, None if `agrees`; "the original" in it is the first implementation.
    """

    name: str
    measurement: Measurement
    speedup: Speedup | None
    agrees: bool | None
    difference: float | None
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, ready for JSON. Numbers that are not finite become None."""
        speedup = self.speedup and self.speedup.as_dict()
        return json_ready({**vars(self), "measurement": self.measurement.as_dict(), "speedup": speedup})

    def summary(self) -> str:
        """Returns the result as one line of text."""
        told = {True: "outputs agree", False: "outputs do NOT agree", None: "outputs could not be compared"}
        agreement = told[self.agrees] + ("" if self.agrees else f": {self.reason}")
        parts = [self.measurement.summary()] + ([self.speedup.summary(), agreement] if self.speedup else [])
        return f"{self.name}: {'; '.join(parts)}"


class KernelProfiler:
    """Compares implementations, and stores the results by label for a table and a chart.

    `results` maps each label to the rows of its last comparison.
    """

    def __init__(self) -> None:
        self.results: dict[str, list[ImplementationResult]] = {}

    def compare_implementations(
        self,
        implementations: Mapping[str, Callable[..., Any]],
        inputs: Any = None,
        warmup: int = 10,
        repeat: int = 100,
        bytes_moved: int | None = None,
        label: str | None = None,
        *,
        args: Sequence[Any] | None = None,
    ) -> list[ImplementationResult]:
        """Compares `implementations` (by name) with the first of them, and returns one row for each, in order.

        The implementations are measured in turns, without gradients, on the same `inputs` or `args`. See
        `benchmark_kernel` for the other arguments. Outputs are compared on copies of the inputs, with the same random
        state.
        label: key of the results; by default dtypes and shapes of the inputs.
        """
        call = call_of(inputs, args)
        rows = _compare(implementations, call, warmup, repeat, bytes_moved)
        self.results[label or call.summary()] = rows
        return rows

    def plot_comparison(
        self, results: Sequence[ImplementationResult] | None = None, path: str | Path = "comparison.png"
    ) -> Path:
        """Writes a bar chart of the median times, with a group per label, as PNG to `path`, and returns `path`.

        results: a result of `compare_implementations`; by default all results.

        Raises:
            ValueError: there are no results. ImportError: matplotlib is not installed.
        """
        labels = {id(rows): label for label, rows in self.results.items()}
        shown = self.results if results is None else {labels.get(id(results), "comparison"): results}
        if not any(shown.values()):
            raise ValueError("there is nothing to plot: call compare_implementations first")
        groups = {label: {row.name: row.measurement for row in rows} for label, rows in shown.items()}
        bar_chart(groups, Path(path))
        return Path(path)

    def summary(self) -> str:
        """Returns a table of all results as plain text."""
        text = StringIO()
        console = Console(file=text, width=WIDTH, color_system=None)
        for label, rows in self.results.items():
            console.print(_table(label, rows))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def compare_functions(
    a: Callable[..., Any],
    b: Callable[..., Any],
    inputs: Any = None,
    warmup: int = 10,
    repeat: int = 100,
    *,
    args: Sequence[Any] | None = None,
) -> ImplementationResult:
    """Compares `b` with `a`: the measurement of `b`, its speed-up over `a`, and whether the outputs agree.

    See `KernelProfiler.compare_implementations`, which also returns the measurement of `a`.
    """
    _, row = _compare({"a": a, "b": b}, call_of(inputs, args), warmup, repeat, None)
    return row


def _compare(
    implementations: Mapping[str, Callable[..., Any]],
    call: ExampleCall,
    warmup: int,
    repeat: int,
    bytes_moved: int | None,
) -> list[ImplementationResult]:
    if not isinstance(implementations, Mapping) or not implementations:
        raise ValueError("implementations must be a non-empty mapping of names to functions")
    check(implementations, warmup, repeat)
    # Before the measurements, because they may write to the inputs.
    outputs = {name: _outputs(fn, call) for name, fn in implementations.items()}
    first = next(iter(outputs.values()))
    agreements = {name: _agreement(first, own) for name, own in outputs.items()}
    del first, outputs
    measurements, timings = measure(implementations, call, warmup, repeat, bytes_moved)
    speedups = {name: timings.speedup(name) for name in implementations if name != timings.baseline}
    return [
        ImplementationResult(name, measurements[name], speedups.get(name), *agreements[name])
        for name in implementations
    ]


def _outputs(fn: Callable[..., Any], call: ExampleCall) -> Any:
    """The outputs of `fn` for a copy of the inputs. Restores the random state."""
    devices = {tensor.device.index for tensor in (*call.tensors(), *tensors_of(fn)) if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        return call.copied()(fn)


def _agreement(first: Any, outputs: Any) -> tuple[bool | None, float | None, str | None]:
    """The (agrees, difference, reason) of an `ImplementationResult`."""
    result = compare(Reference(first, "first implementation"), first, outputs)
    if result.optimized_error is not None:
        return result.passed, result.optimized_error.max_rel, result.reason
    return result.passed, 0.0 if result.passed else None, result.reason


_AGREEMENTS = {True: "", False: "DIFFERS", None: "not known"}


def _table(title: str, rows: list[ImplementationResult]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("implementation", overflow="fold")
    numbers = "median", "95 % interval", "speed-up", "GB/s", "of a copy", "launches", "peak", "difference"
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        measurement, share = row.measurement, row.measurement.copy_share
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        table.add_row(
            escape(row.name),
            time_text(measurement.median_ms),
            f"{time_text(measurement.low_ms)} to {time_text(measurement.high_ms)}",
            f"{row.speedup.ratio:.2f}" if row.speedup else "",
            f"{measurement.bandwidth_gb_s:.3g}",
            "" if share is None else f"{100 * share:.0f} %",
            "" if measurement.launches is None else str(measurement.launches),
            "" if measurement.peak_bytes is None else bytes_text(measurement.peak_bytes),
            f"{difference} {_AGREEMENTS[row.agrees]}".strip(),
        )
    return table
