"""The table and the chart of a lesson's levels."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kfconvert.profiling import bar_chart, time_text

from .measuring import LessonResult, LevelResult


def table(result: LessonResult) -> Group:
    """Returns for rich: the computation and conclusion, a row per level, and a line for each level that did not run."""
    lesson = result.lesson
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("level", no_wrap=True)
    for column in ("median", "95 %", "speed-up", "GB/s", "launches", "error"):
        rows.add_column(column, justify="right")
    for level in result.levels:
        if level.measurement is not None:
            rows.add_row(*_cells(level))
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


def _cells(level: LevelResult) -> list[str]:
    measurement = level.measurement
    assert measurement is not None
    off = max(measurement.high_ms - measurement.median_ms, measurement.median_ms - measurement.low_ms)
    return [
        level.name,
        time_text(measurement.median_ms),
        f"+- {100 * off / measurement.median_ms:.0f} %",
        f"{level.speedup.ratio:.2f}" if level.speedup else "",
        f"{measurement.bandwidth_gb_s:.3g}",
        "" if measurement.launches is None else str(measurement.launches),
        "" if level.error is None else f"{level.error:.1e}",
    ]
