"""A chart of the distributions of call times, on one axis."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

# Size of the drawing, which the page stretches, and the number of PLACES at which the density is computed.
WIDTH, HEIGHT, PLACES = 1000, 48, 160
MOST_TICKS = 6
_LONGEST_MS = 1e12  # thirty years


@dataclass(frozen=True)
class Distribution:
    """The times of one candidate. ``path`` is the outline of the density ("" if only quartiles are known); the other
    fields are positions along the axis in percent."""

    name: str
    timing: dict[str, Any]
    path: str
    q1: float
    median: float
    q3: float
    shortest_ms: float | None
    p95_ms: float | None
    longest_ms: float | None


@dataclass(frozen=True)
class Chart:
    """A chart. ``ticks``: the labels of the axis in milliseconds, each with its position in percent."""

    distributions: list[Distribution]
    ticks: list[tuple[str, float]]


def chart(timings: dict[str, dict[str, Any]]) -> Chart | None:
    """Returns a chart of ``timings`` by candidate, as in ``conversion_stats``; None if there is no valid time.

    The axis ends at the 97.5th percentile of the slowest candidate.
    """
    quantiles = {name: _usable(timing.get("quantiles_ms") or ()) for name, timing in timings.items()}
    ends = []
    for name, timing in timings.items():
        ends += [*quantiles[name][:-1], *_usable([timing[key] for key in ("q1_ms", "median_ms", "q3_ms")])]
    if not ends:
        return None
    margin = max(0.1 * (max(ends) - min(ends)) or 0.02 * max(ends), 1e-6)
    low, high = max(0.0, min(ends) - margin), max(ends) + margin

    def place(milliseconds: float) -> float:
        return min(100.0, max(0.0, 100 * (milliseconds - low) / (high - low)))

    drawn = []
    for name, timing in timings.items():
        known = quantiles[name]
        q1, median, q3 = (place(timing[key]) for key in ("q1_ms", "median_ms", "q3_ms"))
        shortest, p95, longest = (known[0], known[round(0.95 * (len(known) - 1))], known[-1]) if known else [None] * 3
        drawn.append(Distribution(name, timing, _outline(known, low, high), q1, median, q3, shortest, p95, longest))
    return Chart(drawn, [(text, place(value)) for text, value in _ticks(low, high)])


def _usable(times: Any) -> list[float]:
    return sorted(time for time in times if 0 <= time < _LONGEST_MS)


def _outline(times: list[float], low: float, high: float) -> str:
    """The density of ``times`` as an SVG path: Gaussian kernels with the bandwidth of Silverman's rule."""
    if len(times) < 3:
        return ""
    quarter = len(times) // 4
    spread = min(statistics.pstdev(times), (times[-1 - quarter] - times[quarter]) / 1.34) or statistics.pstdev(times)
    width = max(0.9 * spread * len(times) ** -0.2, (high - low) / PLACES)
    heights = []
    for step in range(PLACES + 1):
        at = low + (high - low) * step / PLACES
        heights.append(sum(math.exp(-0.5 * min(40.0, abs(at - time) / width) ** 2) for time in times))
    most = max(heights)
    if most <= 0:
        return ""
    points = [f"{WIDTH * i / PLACES:.1f} {HEIGHT * (1 - 0.96 * h / most):.1f}" for i, h in enumerate(heights)]
    return f"M0 {HEIGHT}L{'L'.join(points)}L{WIDTH} {HEIGHT}Z"


def _ticks(low: float, high: float) -> list[tuple[str, float]]:
    """At most MOST_TICKS round numbers of milliseconds between ``low`` and ``high``."""
    size = 10.0 ** math.floor(math.log10((high - low) / MOST_TICKS))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (size * factor) <= MOST_TICKS)
    first = math.ceil(low / step)
    digits = max(0, -math.floor(math.log10(step)))
    values = [(first + i) * step for i in range(MOST_TICKS) if (first + i) * step <= high]
    return [(f"{value:.{digits}f}", value) for value in values]
