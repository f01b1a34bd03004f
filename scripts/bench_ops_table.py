"""The table that bench_ops.py prints, and the summary of its rows."""

import dataclasses
from collections.abc import Sequence

from bench_ops_cases import Case

from kfconvert.profiling import Comparison, Timing

# From so many elements on an elementwise function or a norm should be as fast as a copy, or nearly so.
LARGE = 5_000_000
NEARLY = 0.9


@dataclasses.dataclass
class Row:
    """A case at one size in one pass.

    uncaptured: variants of `times` that no CUDA graph could hold. launched: times one by one, on CUDA. share:
    of the copy bandwidth, where the bytes are known. errors: as text, by variant.
    """

    case: Case
    size: tuple[int, int]
    part: str
    times: Comparison
    uncaptured: set[str]
    launched: Comparison | None
    share: float | None
    errors: dict[str, str]


def row_name(case: Case, size: tuple[int, int], part: str) -> str:
    return f"{case.name} {size[0]} x {size[1]} {part}"


def header(variants: Sequence[str], cuda: bool) -> str:
    columns = ["operator", "size", "pass", *(f"{variant} us" for variant in variants), "of a copy"]
    if cuda:
        columns.append(f"one by one us: {' / '.join(launched_variants(variants))}")
    columns.append("error eager / kfconvert")
    return f"| {' | '.join(columns)} |\n|---|---|---|{'---:|' * (len(columns) - 3)}"


def line(row: Row, variants: Sequence[str], cuda: bool) -> str:
    cells = [row.case.name, f"{row.size[0]} x {row.size[1]}", row.part]
    for variant in variants:
        mark = "*" if variant in row.uncaptured else ""
        cells.append(time_text(row.times[variant], variant) + mark if variant in row.times else "-")
    cells.append("-" if row.share is None else f"{100 * row.share:.0f} %")
    if cuda:
        medians = {name: f"{1e3 * timing.median_ms:.1f}" for name, timing in (row.launched or {}).items()}
        cells.append(" / ".join(medians.get(name, "-") for name in launched_variants(variants)))
    cells.append(" / ".join(row.errors.get(variant, "-") for variant in ("eager", "kfconvert")))
    return f"| {' | '.join(cells)} |"


def launched_variants(variants: Sequence[str]) -> list[str]:
    """Those that are also timed one by one."""
    return [variant for variant in variants if variant in ("eager", "compile", "kfconvert")]


def time_text(timing: Timing, variant: str) -> str:
    """Microseconds: the quartiles of kfconvert, what they are off the median of the others."""
    q1, median, q3 = (1e3 * ms for ms in (timing.q1_ms, timing.median_ms, timing.q3_ms))
    if variant == "kfconvert":
        return f"{median:.2f} ({q1:.2f}-{q3:.2f})"
    return f"{median:.2f} +-{50 * (q3 - q1) / median:.0f}%"


def summary(rows: Sequence[Row], cuda: bool) -> list[str]:
    lines = []
    for variant in ("eager", "compile"):
        lines += slower(rows, variant, "device time" if cuda else "time", [row.times for row in rows])
        if cuda:
            lines += slower(rows, variant, "time one by one", [row.launched for row in rows])
    large = [
        row
        for row in rows
        if row.share is not None and row.case.group in ("elementwise", "norm") and row.size[0] * row.size[1] >= LARGE
    ]
    if cuda and large:
        below = [row for row in large if row.share < NEARLY]
        names = [f"{row_name(row.case, row.size, row.part)} ({100 * row.share:.0f} %)" for row in below]
        what = f"from {LARGE // 10**6} M elements on are below {100 * NEARLY:.0f} % of a copy"
        lines.append(listed(f"{len(below)} of {len(large)} elementwise and norm rows {what}", names))
    return lines


def slower(rows: Sequence[Row], variant: str, what: str, times: Sequence[Comparison | None]) -> list[str]:
    """Where kfconvert is slower than a variant by more than the noise; no line where neither was timed."""
    names, count = [], 0
    for row, timings in zip(rows, times):
        if timings is None or variant not in timings or "kfconvert" not in timings:
            continue
        count += 1
        speedup = timings.speedup("kfconvert", variant)
        if speedup.measurable and speedup.ratio < 1:
            names.append(f"{row_name(row.case, row.size, row.part)} (x {speedup.ratio:.2f})")
    return [listed(f"{len(names)} of {count} rows slower than {variant} by {what}", names)] if count else []


def listed(text: str, names: Sequence[str]) -> str:
    return f"{text}: {', '.join(names)}." if names else f"{text}."
