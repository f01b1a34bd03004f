"""Implementations of one function against each other: times, speed-ups, and whether they agree."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..accuracy import Reference, compare, one_line
from ..inputs import ExampleCall
from ..json_values import json_ready
from .bandwidth import tensors_of
from .benchmarks import call_of, check, measure
from .comparison import Speedup
from .measurement import Measurement, bytes_text, time_text
from .plot import bar_chart

# Columns of text in the table of `KernelProfiler.summary`.
WIDTH = 120


@dataclasses.dataclass(frozen=True)
class ImplementationResult:
    """One implementation, compared with the first one.

    `speedup` is that over the first, None for the first itself. `difference` is the largest difference from
    the outputs of the first, relative to the largest value of the output that it is in; None where they
    cannot be compared. `agrees`: they have the same structure, shapes and dtypes, and differ by at most 1e-6
    and 4 units of rounding of their dtype; exact values and the places of NaN and infinities are the same;
    sparse tensors stand for dense ones. It is None where nothing could be compared.
    `reason` is one line, None when `agrees`; "the original" in it is the first implementation.
    """

    name: str
    measurement: Measurement
    speedup: Speedup | None
    agrees: bool | None
    difference: float | None
    reason: str | None

    def as_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON; a number that is not finite becomes None."""
        return json_ready(
            {
                **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
                "measurement": self.measurement.as_dict(),
                "speedup": self.speedup and self.speedup.as_dict(),
            }
        )

    def summary(self) -> str:
        """One line for people."""
        told = {True: "outputs agree", False: "outputs do NOT agree", None: "whether outputs agree is not known"}
        agreement = told[self.agrees] + ("" if self.agrees else f": {self.reason}")
        parts = [self.measurement.summary()] + ([self.speedup.summary(), agreement] if self.speedup else [])
        return f"{self.name}: {'; '.join(parts)}"


class KernelProfiler:
    """Compares implementations, and keeps the results by label for a table and a chart.

    `results` maps each label to the rows of its latest comparison.
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
        """Compare `implementations` (by name) with the first of them; one row for each, in their order.

        They are measured in turns, without gradients, on the same `inputs`, or `args` in their place; see
        `benchmark_kernel` for these and the further arguments. Their outputs are compared on copies of the inputs,
        from the same random state.
        label: what the results are kept under, the dtypes and shapes of the inputs unless given.
        """
        _check_strings("labels", [label or ""])
        call = call_of(inputs, args)
        rows = _compare(implementations, call, warmup, repeat, bytes_moved)
        self.results[label or call.summary()] = rows
        return rows

    def plot_comparison(
        self, results: Sequence[ImplementationResult] | str | Path | None = None, path: str | Path = "comparison.png"
    ) -> Path:
        """Write a bar chart of the median times, a group for each label, as PNG to `path`, which is returned.

        results: what `compare_implementations` returned, to be shown alone; all that was compared without it. A
        path in this place is `path`.

        Raises:
            ValueError: nothing was compared yet. TypeError: `results` are none.
            ImportError: matplotlib is not installed.
        """
        if isinstance(results, (str, Path)):
            path, results = results, None
        shown = self.results if results is None else {_label_of(results, self.results): results}
        if not any(shown.values()):
            raise ValueError("there is nothing to plot: call compare_implementations first")
        bar_chart(
            {label: {row.name: row.measurement for row in rows} for label, rows in shown.items()},
            Path(path),
        )
        return Path(path)

    def summary(self) -> str:
        """A table of all results as plain text."""
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
    """`b` compared with `a`: its measurement, its speed-up over `a`, and whether its outputs agree.

    See `KernelProfiler.compare_implementations`, which also gives the measurement of `a`.
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
        raise ValueError("implementations must be a mapping of names to functions, with one at least")
    _check_strings("names of implementations", implementations)
    check(implementations, warmup, repeat, bytes_moved)
    # Before the measurements: they may write into the inputs.
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


def _label_of(rows: Any, results: Mapping[str, list[ImplementationResult]]) -> str:
    """What `rows` are kept under in `results`; "comparison" where they are not there any more."""
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, ImplementationResult) for row in rows):
        raise TypeError(f"results must be what compare_implementations returned, not {type(rows).__name__}")
    return next((label for label, kept in results.items() if kept == rows), "comparison")


def _check_strings(what: str, values: Iterable[Any]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{what} must be strings, not {type(value).__name__}")


def _outputs(fn: Callable[..., Any], call: ExampleCall) -> Any:
    """What `fn` returns for a copy of the inputs; the random state is put back."""
    devices = {tensor.device.index for tensor in (*call.tensors(), *tensors_of(fn)) if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        return call.copied()(fn)


def _agreement(first: Any, outputs: Any) -> tuple[bool | None, float | None, str | None]:
    """(agrees, difference, reason) of an `ImplementationResult`."""
    try:
        result = compare(Reference(first, "first implementation"), first, outputs)
    except RuntimeError as error:  # a subclass of tensors may lack operators
        return False, None, f"the outputs cannot be compared: {one_line(error)}"
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
