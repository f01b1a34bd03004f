"""A chart of measurements. Only this module needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path

from .measurement import Measurement

# If times differ by more than this factor, the axis is logarithmic, so that the smallest bar is readable.
LINEAR_RANGE = 20.0


def bar_chart(groups: Mapping[str, Mapping[str, Measurement]], path: Path) -> None:
    """Writes a PNG of the median times to `path`: a group of bars per label, a bar per name, with 95 % intervals.

    A name has the same color in all groups, and may be missing in some. Names and labels are shown verbatim.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a chart needs matplotlib: pip install 'kfconvert[plot]'") from error

    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    medians = [measurement.median_ms for group in groups.values() for measurement in group.values()]
    unit, per_ms = ("us", 1e3) if max(medians) < 1 else ("ms", 1.0)
    width = 0.8 / len(names)
    # A figure with an explicit canvas does not change the caller's backend.
    figure = Figure(figsize=(max(6.0, 1.0 + 0.4 * len(names) * len(groups)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, bars = figure.add_subplot(), []
    for index, name in enumerate(names):
        shown = [(place, group[name]) for place, group in enumerate(groups.values()) if name in group]
        heights = [per_ms * measurement.median_ms for _, measurement in shown]
        below = [per_ms * (measurement.median_ms - measurement.low_ms) for _, measurement in shown]
        above = [per_ms * (measurement.high_ms - measurement.median_ms) for _, measurement in shown]
        places = [place + (index - (len(names) - 1) / 2) * width for place, _ in shown]
        bars.append(axes.bar(places, heights, width, yerr=(below, above), capsize=2))
    if max(medians) > LINEAR_RANGE * min(medians):
        axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), list(groups), rotation=15 if len(groups) > 2 else 0, parse_math=False)
    axes.set_ylabel(f"median time of a call, {unit}")
    # Names are set last and escaped: matplotlib parses $ as a formula and hides labels with a leading _.
    for text, name in zip(axes.legend(bars, "-" * len(bars)).get_texts(), names):
        text.set(text=name, parse_math=False)
    figure.savefig(path, format="png", dpi=150)
