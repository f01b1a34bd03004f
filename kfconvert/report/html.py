"""The report of a conversion as one HTML file that loads nothing and runs no code.

The statistics may come from an untrusted artifact. The page escapes their texts, and replaces unprintable characters.
Its content security policy forbids scripts and network access.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from ..version import __version__
from .module_times import ModuleTimes, module_times
from .table import (
    accuracy_line,
    captured_line,
    fusions,
    generated_line,
    generation_line,
    graphs_line,
    is_channels_last,
    methods_lines,
    not_captured_lines,
    nothing_fused_line,
    served_lines,
    speed_line,
    speedup_line,
)
from .words import bytes_text, error_text, share_text, time_text

_NAMES = {"extension": "compiled kernels"}  # labels of statistics whose key is not readable
_TEMPLATES = Path(__file__).parent / "templates"


class Tile(NamedTuple):
    """A fact at the top of the page. ``tone``: "good", "bad", "warn" or "" (neutral)."""

    label: str
    value: str
    detail: str
    tone: str = ""


class Bar(NamedTuple):
    """A row of a chart. ``share``: length in percent of the longest row."""

    label: str
    value: str
    share: float


def page(stats: dict[str, Any], name: str = "", weights: str = "") -> str:
    """Returns the report of one model as an HTML file. Equal arguments give equal text.

    Args:
        stats: ``conversion_stats``, ready for JSON.
        name: the user's name for the model; "" shows the class name.
        weights: "pretrained", "random" or "own", as in the recipe; "" if unknown.
    """
    return _template("page.html").render(_content(stats, name, weights))


def fragment(stats: dict[str, Any]) -> str:
    """Returns the report as part of another page, such as a notebook."""
    return _template("fragment.html").render(_content(stats, "", ""))


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": bytes_text, "error": error_text, "time": time_text}
    environment.globals |= {"share": share_text}
    return environment.get_template(name)


def _shown(value: Any) -> Any:
    """The text for ``value`` in the page, in printable characters."""
    if isinstance(value, Markup):  # from the template
        return value
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def _content(stats: dict[str, Any], name: str, weights: str) -> dict[str, Any]:
    timings, sites = stats.get("timings"), stats.get("sites") or []
    environment, memory, accuracy = stats.get("environment") or {}, stats.get("memory"), stats.get("accuracy")
    tree, rows = module_times(sites), fusions(sites)
    rejected = [(row["pattern"], *each) for row in rows for each in row["reasons"].items()]
    return {
        "version": __version__,
        "title": name or stats.get("model") or "a model",
        "facts": _facts(stats, environment, name),
        "tiles": [_speed(stats), _fused(stats, tree), _accuracy(stats), *([_memory(memory)] if memory else [])],
        "notices": _notices(stats, environment, weights),
        "times": timings["timings"] if timings else {},
        "time_bars": _bars({n: 1e3 * each["median_ms"] for n, each in timings["timings"].items()}) if timings else [],
        "speedups": _speedups(stats),
        "generation_line": generation_line(stats),
        "graphs_line": graphs_line(stats),
        "generated_line": generated_line(stats),
        "tuned": [(each, speed_line(each)) for each in stats.get("tuned_for") or ()],
        "tree": tree,
        "further": _further(stats),
        "fusions": rows,
        "rejected": sorted(rejected, key=lambda group: -len(group[2])),
        "near_misses": stats.get("near_misses") or (),
        "accuracy": accuracy,
        "accuracy_line": accuracy_line(stats),
        "outputs": (accuracy or {}).get("outputs") or (),
        "memory": memory,
        "memory_bars": _memory_bars(memory) if memory else (),
        "peak_bars": _peak_bars(memory["peak"]) if memory else (),
        "captured": captured_line(stats),
        "calls": [*served_lines(stats), *methods_lines(stats)],
        "not_captured": not_captured_lines(stats),
        "environment": _plain(environment),
        "options": _plain(stats.get("config") or {}),
        "seconds": _bars({stage: seconds * 1e6 for stage, seconds in (stats.get("seconds") or {}).items()}),
    }


def _facts(stats: dict[str, Any], environment: dict[str, Any], name: str) -> list[str]:
    facts = [stats.get("model") if name else "", stats.get("inputs"), *map(environment.get, ("device", "dtype"))]
    facts += ["converted to channels-last"] if is_channels_last(stats) else []
    return [fact for fact in facts if isinstance(fact, str) and fact not in ("", "None")]  # without parameters: "None"


def _speed(stats: dict[str, Any]) -> Tile:
    comparison = stats.get("timings") or {}
    speedup = comparison.get("speedups", {}).get("converted")
    if not speedup:
        return Tile("Speed", "not measured", "")
    times = comparison["timings"]
    both = [times[each]["median_ms"] for each in ("original", "converted") if each in times]
    detail = " → ".join(time_text(1e3 * each) for each in both) + " per call"
    ratio = speedup["ratio"]
    if not speedup["measurable"] or not ratio or ratio < 0:
        return Tile("Speed", "as before", f"{detail}, no measurable difference")
    if ratio < 1:
        return Tile("Speed", f"{1 / ratio:.2f} × slower", detail, "bad")
    return Tile("Speed", f"{ratio:.2f} × faster", detail, "good")


def _speedups(stats: dict[str, Any]) -> list[str]:
    comparison = stats.get("timings")
    if not comparison:
        return ["The speed was not measured."]
    named = len(comparison["speedups"]) > 1
    return [speedup_line(name, speedup, named) for name, speedup in comparison["speedups"].items()]


def _fused(stats: dict[str, Any], tree: ModuleTimes) -> Tile:
    found, applied = stats.get("total_found", 0), stats.get("total_replaced", 0)
    share = share_text(tree.fused, tree.before)
    detail = ("site" if found == 1 else "sites") + (f", {share} of their time" if share else "")
    return Tile("Fused", f"{applied} of {found}", detail, "" if applied else "warn")


def _accuracy(stats: dict[str, Any]) -> Tile:
    result = stats.get("accuracy")
    if result is None:
        return Tile("Accuracy", "not checked", "")
    if result["passed"] is None:
        return Tile("Accuracy", "not comparable", result["reason"] or "", "warn")
    own, error = result.get("original_error"), result.get("optimized_error")
    both = f"error {error_text(error['max_rel'])}, original {error_text(own['max_rel'])}" if own and error else ""
    return Tile("Accuracy", "pass" if result["passed"] else "fail", both, "good" if result["passed"] else "bad")


def _memory(memory: dict[str, Any]) -> Tile:
    kept = (memory["derived"] or 0) + memory["recordings"]
    share = share_text(kept, memory["weights"])
    return Tile("Memory", f"+ {bytes_text(kept)}", f"{share} of the weights, in addition to them".lstrip())


def _notices(stats: dict[str, Any], environment: dict[str, Any], weights: str) -> list[tuple[str, str]]:
    """(tone, text) of each warning at the top of the page."""
    notices = []
    if stats.get("reverted"):
        notices.append(("bad", f"The original is returned: {stats['reverted']}."))
    elif not stats.get("total_replaced"):
        notices.append(("warn", nothing_fused_line(stats)))
    if (stats.get("accuracy") or {}).get("passed") is False and not stats.get("reverted"):
        notices.append(("bad", f"Not accurate: {stats['accuracy']['reason']}."))
    if weights == "random":
        notices.append(("warn", "The weights are random: times are those of the real model, predictions mean nothing."))
    if environment.get("extension") is False:
        notices.append(("warn", "The conversion ran without the compiled kernels. See kfconvert doctor."))
    if stats.get("parts_left_out"):
        left_out = stats["parts_left_out"]
        notices.append(("warn", f"The search for parts ran out of time and skipped {left_out} modules."))
    if stats.get("not_written"):
        names = ", ".join(stats["not_written"])
        notices.append(("warn", f"Fused calls do not set the attributes that the original forward sets: {names}."))
    return notices


def _further(stats: dict[str, Any]) -> list[str]:
    """One line for each group of sites that the tree does not show."""
    lines = []
    parts = stats.get("part_sites") or []
    for sites, where in (
        (list(itertools.chain.from_iterable(stats.get("form_sites") or ())), "further forms of the call"),
        (parts if any(not site.get("region") for site in stats.get("sites") or ()) else [], "modules by themselves"),
    ):
        if sites:
            applied = sum(site["status"] == "applied" for site in sites)
            lines.append(f"In {where}: {applied} of {len(sites)} sites fused.")
    return lines


def _memory_bars(memory: dict[str, Any]) -> list[Bar]:
    kept = {"weights": memory["weights"], "derived": memory["derived"] or 0}
    return _bars(kept | ({"CUDA graphs": memory["recordings"]} if memory["recordings"] else {}), bytes_text)


def _peak_bars(peak: dict[str, Any]) -> list[Bar]:
    known = {f"{model} model": peak[model] for model in ("original", "converted") if peak[model] is not None}
    return _bars(known, bytes_text)


def _bars(values: Mapping[str, Any], text: Callable[[Any], str] = time_text) -> list[Bar]:
    """One bar for each value: a number of microseconds, unless ``text`` is of another unit."""
    most = max(values.values(), default=0)
    shares = {name: min(100.0, max(0.0, 100 * value / most)) if most > 0 else 0.0 for name, value in values.items()}
    return [Bar(name, text(value), shares[name]) for name, value in values.items()]


def _plain(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """The items of ``values`` that fit in a line."""
    kinds = (str, int, float, list)
    return [(_NAMES.get(key, key), _told(value)) for key, value in values.items() if isinstance(value, kinds)]


def _told(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(each for each in value if isinstance(each, str)) or "none"
    return value
