"""Comparison of two conversions: speed, accuracy, memory, and the sites with different decisions."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .words import bytes_text, error_text, time_text

MAX_SITES_SHOWN = 40
# Characters of an option's value that are shown.
_WIDTH = 80
# Conditions that make times comparable, with their path in the statistics. Options are conditions, too.
_CONDITIONS = {
    "model": ("model",),
    "inputs": ("inputs",),
    "device": ("environment", "device"),
    "dtype": ("environment", "dtype"),
    "threads": ("environment", "threads"),
    "layout": ("layout",),
    "torch": ("environment", "torch"),
    "kfconvert": ("environment", "kfconvert"),
}
# Numbers, with their path in the statistics and their text. The times are in milliseconds.
_NUMBERS: dict[str, tuple[tuple[str, ...], Callable[[Any], str]]] = {
    "sites found": (("total_found",), str),
    "sites fused": (("total_replaced",), str),
    "original": (("timings", "timings", "original", "median_ms"), lambda ms: time_text(1e3 * ms)),
    "converted": (("timings", "timings", "converted", "median_ms"), lambda ms: time_text(1e3 * ms)),
    "speed-up": (("speedup_achieved",), "{:.2f} x".format),
    "tokens/s": (("generation", "converted", "tokens_per_s"), "{:.0f}".format),
    "accurate": (("accuracy", "passed"), lambda passed: "yes" if passed else "NO"),
    "error": (("accuracy", "optimized_error", "max_rel"), error_text),
    "weights": (("memory", "weights"), bytes_text),
    "derived": (("memory", "derived"), bytes_text),
    "CUDA graphs": (("memory", "recordings"), bytes_text),
    "peak": (("memory", "peak", "converted"), bytes_text),
}
_TIMES = ("original", "converted")


def comparison(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the differences between two conversions, ready for JSON.

    Args:
        first, second: ``conversion_stats`` of each.

    Returns:
        ``same_model``: whether both are of one class; ``conditions``: differences of model, inputs, environment and
        options, {name: [first, second]}; ``numbers``: {name: [first, second]}, times in milliseconds, memory in bytes,
        None if unknown; ``overlap``: names of the times whose interquartile ranges overlap; ``sites``: sites with
        different decisions, {"pattern", "module", "first", "second"}, empty if the classes differ.
    """
    both = (first, second)
    same = _at(first, ("model",)) == _at(second, ("model",))
    options = {name: ("config", name) for stats in both for name in stats.get("config") or ()}
    conditions = {name: [_at(stats, place) for stats in both] for name, place in (_CONDITIONS | options).items()}
    return {
        "same_model": same,
        "conditions": {name: values for name, values in conditions.items() if values[0] != values[1]},
        "numbers": {name: [_at(stats, place) for stats in both] for name, (place, _) in _NUMBERS.items()},
        "overlap": [n for n in _TIMES if _overlap(*(_at(stats, ("timings", "timings", n)) for stats in both))],
        "sites": _differing(first, second) if same else [],
    }


def render_comparison(names: tuple[str, str], found: dict[str, Any]) -> RenderableType:
    """Renders a ``comparison`` for a terminal; ``names`` are the user's names for the two conversions."""
    parts: list[RenderableType] = [Text.assemble((letter, "bold"), f"  {name}") for letter, name in zip("AB", names)]
    for name, values in found["conditions"].items():
        missing = "unknown" if name in _CONDITIONS else "none"
        first, second = (missing if value in (None, "") else textwrap.shorten(str(value), _WIDTH) for value in values)
        style = "yellow" if name in ("model", "inputs", "device", "dtype") else "dim"
        parts.append(Text(f"{name}: A {first}, B {second}", style=style))
    table = _table("", "A", "B", "change")
    for name, values in found["numbers"].items():
        if values != [None, None]:
            told = ("" if value is None else _NUMBERS[name][1](value) for value in values)
            table.add_row(name, *told, _change(name, values, found["overlap"]))
    parts.append(table)
    if not found["same_model"]:
        return Group(*parts, Text("The models differ, so their sites are not compared."), "")
    sites = found["sites"]
    if not sites:
        return Group(*parts, Text("All sites have the same decision."), "")
    table = _table("fusion", "module", "A", "B")
    for site in sites[:MAX_SITES_SHOWN]:
        table.add_row(*(Text(site[key]) for key in ("pattern", "module", "first", "second")))
    hidden = len(sites) - MAX_SITES_SHOWN
    more = [Text(f"and {hidden} more (--json lists all)")] if hidden > 0 else []
    return Group(*parts, Text(f"{len(sites)} sites have different decisions:"), table, *more, "")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _at(stats: dict[str, Any], place: tuple[str, ...]) -> Any:
    found: Any = stats
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _overlap(first: dict[str, Any] | None, second: dict[str, Any] | None) -> bool:
    if first is None or second is None:
        return False
    return first["q1_ms"] <= second["q3_ms"] and second["q1_ms"] <= first["q3_ms"]


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, str]]:
    """The sites whose decisions differ; several in one module come in the order of the graph."""
    ours, theirs = _decisions(first), _decisions(second)
    found = []
    for pattern, module in dict.fromkeys((*ours, *theirs)):
        pairs = zip_longest(ours[pattern, module], theirs[pattern, module], fillvalue=("not found", ""))
        for one, two in pairs:
            if one[0] != two[0]:
                told = {"first": "".join(one), "second": "".join(two)}
                found.append({"pattern": pattern, "module": module or "the model itself", **told})
    return found


def _decisions(stats: dict[str, Any]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The decisions and their details for each (pattern, module)."""
    found = defaultdict(list)
    for site in stats.get("sites") or ():
        if site["status"] == "applied":
            decision = (f"fused ({site['strategy']})", "")
        else:
            decision = ("not fused", f": {site['reason'] or 'no reason given'}")
        found[site["pattern"], site["module"]].append(decision)
    return found


def _change(name: str, values: list[Any], overlap: list[str]) -> str:
    first, second = values
    if first is None or second is None or first == second or name == "accurate":
        return ""
    if name.startswith("sites"):
        return f"{second - first:+d}"
    if first <= 0 or second < 0:
        return ""
    if name == "error" or second / first >= 10:
        return f"x {second / first:.2g}"
    spread = ", within the spread" if name in overlap else ""
    return f"{100 * (second / first - 1):+.0f} %{spread}"
