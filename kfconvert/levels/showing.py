"""The table and the chart of a lesson's levels."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..profiling import bar_chart, time_text
from .measuring import LessonResult, LevelResult


def table(result: LessonResult) -> Group:
    """Returns for rich: the computation and conclusion, a row per level, and a line for each level that did not run.

    On the CPU, the table shows calls of PyTorch's operators instead of launches.
    """
    lesson = result.lesson
    on_cuda = result.device.startswith("cuda")
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("level", no_wrap=True)
    for column in ("median", "95 %", "speed-up", "GB/s", "launches" if on_cuda else "calls", "error"):
        rows.add_column(column, justify="right")
    for level in result.levels:
        if level.measurement is not None:
            rows.add_row(*_cells(level, on_cuda))
    sizes = ", ".join(f"{name} {number}" for name, number in result.sizes.items())
    heading = Text(f"{lesson.name}: {lesson.formula}\n{result.device}, {result.size}: {sizes}")
    left_out = [
        Text(f"{level.name}: {level.problem or f'not here: {level.missing}'}", style="red" if level.problem else "")
        for level in result.levels
        if level.measurement is None
    ]
    return Group(heading, rows, *left_out, Text(f"What it shows: {lesson.learned}.\n"))


def plot(results: Sequence[LessonResult], path: str | Path) -> None:
    """Writes a PNG bar chart of the median times with 95 % intervals to ``path``, with a group per lesson.

    Raises:
        ImportError: matplotlib is not installed.
    """
    groups = {
        result.lesson.name: {level.name: level.measurement for level in result.levels if level.measurement is not None}
        for result in results
    }
    bar_chart(groups, Path(path))


def _cells(level: LevelResult, on_cuda: bool) -> list[str]:
    measurement = level.measurement
    assert measurement is not None
    off = max(measurement.high_ms - measurement.median_ms, measurement.median_ms - measurement.low_ms)
    calls = measurement.launches if on_cuda else level.operators
    return [
        level.name,
        time_text(measurement.median_ms),
        f"+- {100 * off / measurement.median_ms:.0f} %",
        f"{level.speedup.ratio:.2f}" if level.speedup else "",
        f"{measurement.bandwidth_gb_s:.3g}",
        "" if calls is None else str(calls),
        "" if level.error is None else f"{level.error:.1e}",
    ]
