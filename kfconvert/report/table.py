"""The report of a conversion for a terminal: ``conversion_stats`` in lines and a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..graph import at
from .words import bytes_text, error_text, plain_text, reason_kind, timing_text

MAX_REASONS = 3
MAX_NEAR_MISSES = 5


def fusions(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one dict per pattern: "pattern", "found", "applied", "rejected", and "reasons" {reason: modules}.

    The most applied pattern and the most frequent reason come first. Reasons that differ only in numbers count as one.
    """
    rows: dict[str, dict[str, Any]] = {}
    for site in sites:
        first = {"pattern": site["pattern"], "found": 0, "applied": 0, "rejected": 0, "reasons": {}}
        row = rows.setdefault(site["pattern"], first)
        row["found"] += 1
        if site["status"] == "applied":
            row["applied"] += 1
            continue
        row["rejected"] += 1
        reason = site["reason"] or "no reason given"
        row["reasons"].setdefault(reason_kind(reason), (reason, []))[1].append(site["module"] or "the model itself")
    for row in rows.values():
        row["reasons"] = dict(sorted(row["reasons"].values(), key=lambda each: -len(each[1])))
    return sorted(rows.values(), key=lambda row: (-row["applied"], -row["found"], row["pattern"]))


def accuracy_line(stats: dict[str, Any]) -> str:
    """A line on accuracy: the errors of both models against the reference, their ratio, and the verdict."""
    result = stats.get("accuracy")
    if result is None:
        return "not checked"
    if result["passed"] and stats.get("total_found") == 0:
        return "nothing was replaced, so nothing was compared"
    if result["passed"] is None:
        return result["reason"] or "nothing could be compared"
    verdict = "pass" if result["passed"] else f"FAIL: {result['reason']}"
    original, converted = result.get("original_error"), result.get("optimized_error")
    if not original or not converted:
        return verdict
    ratio = "" if result.get("ratio") is None else f", ratio {result['ratio']:.2f}"
    return (
        f"{verdict} | error against the {result.get('reference')}: original {error_text(original['max_rel'])}, "
        f"converted {error_text(converted['max_rel'])}{ratio}"
    )


def speed_line(stats: dict[str, Any]) -> str:
    """A line on speed: both times with quartiles, and the speed-up with its interval."""
    comparison = stats.get("timings")
    if not comparison:
        return "not measured"
    timings = comparison["timings"]
    parts = [f"{name} {timing_text(timing)}" for name, timing in timings.items()]
    speedups = [speedup_line(name, speedup, len(timings) > 2) for name, speedup in comparison["speedups"].items()]
    returned = ["the original is returned"] if given_back(stats) else []
    return " -> ".join(parts) + " | " + "; ".join(speedups + returned)


def generation_line(stats: dict[str, Any]) -> str:
    """A line on ``generate``: tokens per second, time to the first token and time per step, or why it was not
    timed."""
    generation = stats.get("generation")
    if not generation and (stats.get("config") or {}).get("new_tokens") and not stats.get("total_replaced"):
        return "not timed because nothing was fused"
    if not generation:
        return ""
    before, after = generation["original"], generation["converted"]
    prompt = " x ".join(map(str, generation["prompt"]))
    parts = [f"{before['tokens_per_s']:.0f} -> {after['tokens_per_s']:.0f} tokens/s"]
    parts.append(f"prefill {before['prefill_ms']:.2f} -> {after['prefill_ms']:.2f} ms")
    if before["step_ms"] is not None and after["step_ms"] is not None:
        parts.append(f"step {before['step_ms']:.2f} -> {after['step_ms']:.2f} ms")
    returned = "; the original is returned" if given_back(stats) else ""
    asked = f"prompt {prompt}, {generation['new_tokens']} new"
    return f"{asked}: {', '.join(parts)} | {speedup_line('', generation['speedup'], False)}{returned}"


def graphs_line(stats: dict[str, Any]) -> str:
    """A line on CUDA graphs: whether calls are replayed, the memory of a recording, and refusals with reasons."""
    graphs, timings = stats.get("cuda_graphs") or {}, (stats.get("timings") or {}).get("timings") or {}
    told = [f"not recorded: {reason}" for reason in graphs.get("refused", ())]
    if "with CUDA graphs" in timings:
        told.insert(0, "slower with CUDA graphs, so calls are launched without them")
    elif graphs.get("recordings"):
        told.insert(0, f"calls are replayed; {graphs.get('bytes', 0) / 2**20:.0f} MiB for the first recording")
    return "; ".join(told)


def generated_line(stats: dict[str, Any]) -> str:
    """A line on the kernels that TorchInductor generated: the time of a recorded call without and with them."""
    where = {"all": "in place of the fused modules", "rest": "around the fused modules"}
    return "; ".join(
        f"TorchInductor, {where[form['kernels']]}: a replay takes {form['before_us']:.0f} -> {form['after_us']:.0f} us"
        for form in stats.get("generated") or ()
    )


def memory_line(stats: dict[str, Any]) -> str:
    """A line on memory: the weights, derived tensors, and the peak memory of a forward."""
    memory = stats.get("memory")
    if not memory:
        return ""
    parts = [f"weights {bytes_text(memory['weights'])}"]
    for name in ("derived", "recordings"):
        if memory[name]:
            parts.append(f"{name} {bytes_text(memory[name])} ({100 * memory[name] / max(1, memory['weights']):.0f} %)")
    if memory.get("allowed") is not None:
        parts.append(f"{bytes_text(memory['allowed'])} may be derived")
    peak = memory["peak"]
    if peak["original"] is not None and peak["converted"] is not None:
        parts.append(f"peak of a forward {bytes_text(peak['original'])} -> {bytes_text(peak['converted'])}")
    return ", ".join(parts)


def render(name: str, stats: dict[str, Any], weights: str | None = None, saved: str | None = None) -> RenderableType:
    """Renders the report of one model for a terminal.

    Args:
        name: the user's name for the model; "" shows the class name.
        weights: "pretrained", "random" or "own", as in the recipe; "random" is printed in yellow.
        saved: the folder of the artifact.
    """
    parts: list[RenderableType] = [_headline(name, stats)]
    rows = fusions(stats.get("sites") or [])
    if rows:
        parts.append(_table(rows))
    if not stats.get("total_replaced"):
        parts.append(_nothing_fused(stats))
    accuracy = accuracy_line(stats)
    colour = {"pass": "green", "FAIL": "bold red"}.get(accuracy[:4], "")
    lines: list[tuple[str, str | Text | None]] = [
        ("accuracy", Text(accuracy, style=colour)),
        ("speed", Text(speed_line(stats), style=_speed_style(stats))),
        ("layout", "channels-last: the converted model uses this memory format" if is_channels_last(stats) else None),
        ("generate", generation_line(stats)),
        *(
            ("tuned for", f"{tuned['inputs']}, weight {tuned['weight']:g}: {speed_line(tuned)}")
            for tuned in stats.get("tuned_for") or ()
        ),
        ("CUDA graphs", graphs_line(stats)),
        ("generated", generated_line(stats)),
        ("memory", memory_line(stats)),
        ("weights", Text(weights or "", style="bold yellow" if weights == "random" else "")),
        ("captured", captured_line(stats)),
        *(("served", line) for line in served_lines(stats)),
        *(("methods", line) for line in methods_lines(stats)),
        *(("not captured", line) for line in not_captured_lines(stats)),
    ]
    if stats.get("parts_left_out"):
        lines.append(("left out", f"{stats['parts_left_out']} modules: the search for parts ran out of time"))
    if stats.get("not_written"):
        names = ", ".join(stats["not_written"])
        lines.append(("not written", f"{names}: the original forward sets these attributes, fused calls do not"))
    if stats.get("seconds"):
        cached = {"timings": stats.get("remembered"), "graphs": stats.get("remembered_graphs")}
        remembered = "".join(f", {count} cached {what} used" for what, count in cached.items() if count)
        lines.append(("took", f"{sum(stats['seconds'].values()):.1f} s{remembered}"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for label, line in (*lines, ("saved in", saved)):
        if line:
            facts.add_row(label, line if isinstance(line, Text) else Text(line))
    return Group(*parts, facts, "")


def is_channels_last(stats: dict[str, Any]) -> bool:
    """Whether the convolutions of the converted model use channels-last."""
    return stats.get("layout") == "channels_last" and bool(stats.get("total_replaced"))


def report_text(stats: dict[str, Any], name: str = "") -> str:
    """Returns the report of one model in lines of at most 80 characters. ``name`` as in ``render``."""
    return plain_text(render(name, stats), 80)


def _headline(name: str, stats: dict[str, Any]) -> Text:
    environment = stats.get("environment") or {}
    # A model without parameters has no dtype; statistics call it "None".
    where = ", ".join(
        str(environment[key]) for key in ("device", "dtype") if environment.get(key) not in (None, "", "None")
    )
    if stats.get("autocast"):
        where += f" under autocast to {stats['autocast']}"
    model = stats.get("model", "")
    line = Text(name or model, style="bold")
    if name:
        line.append(f"  {model}", style="dim")
    line.append(f"  {stats.get('inputs', '')}", style="dim")
    line.append(f"  {where}", style="dim")
    line.append(f"\n{stats.get('total_replaced', 0)} of {stats.get('total_found', 0)} sites fused", style="bold")
    if environment.get("extension") is False:
        line.append("  (without the compiled kernels: see kfconvert doctor)", style="yellow")
    return line


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("fusion")
    for column in ("found", "applied", "rejected"):
        table.add_column(column, justify="right")
    table.add_column("why rejected", overflow="fold")
    for row in rows:
        more = {reason: len(modules) - 1 for reason, modules in row["reasons"].items()}
        reasons = [f"{reason} (and {count} more)" if count else reason for reason, count in more.items()]
        hidden = len(reasons) - MAX_REASONS
        shown = reasons[:MAX_REASONS] + ([f"{hidden} more reasons"] if hidden > 0 else [])
        style = "" if row["applied"] else "dim"
        counts = (row["found"], row["applied"], row["rejected"] or "")
        table.add_row(row["pattern"], *map(str, counts), escape("\n".join(shown)), style=style)
    return table


def nothing_fused_line(stats: dict[str, Any]) -> str:
    """A line for models without a fused site: the reason if known, and the consequence for calls."""
    why = f": {stats['nothing_fused']}" if stats.get("nothing_fused") else ""
    if given_back(stats):
        return f"Nothing was fused, so the original is returned{why}."
    if stats.get("replays_unfused"):
        return f"Nothing was fused, but calls are replayed from CUDA graphs{why}."
    return f"Nothing was fused in calls like the example{why}."


def given_back(stats: dict[str, Any]) -> str | None:
    """Returns the reason why the original is returned; None if the model has programs."""
    return stats.get("given_back") or stats.get("reverted")


def _nothing_fused(stats: dict[str, Any]) -> Text:
    text = Text(nothing_fused_line(stats), style="yellow")
    misses = stats.get("near_misses", [])
    if misses:
        text.append("\nClosest patterns, and why they do not match:")
    for miss in misses[:MAX_NEAR_MISSES]:
        why = f"{miss['reason']}{at(miss.get('location'))}"
        text.append(f"\n  {miss['pattern']} at {miss['module'] or 'the root'}: {why}", style="")
    if len(misses) > MAX_NEAR_MISSES:
        text.append(f"\n  and {len(misses) - MAX_NEAR_MISSES} more (--json lists all)")
    return text


def captured_line(stats: dict[str, Any]) -> str | None:
    """A line on the submodules that were captured alone; None if there are none."""
    regions = [region for region in stats.get("regions", []) if region["captured"]]
    parts = [region["module"] for region in regions if region.get("module")]
    if not parts:
        return None
    if len(parts) < len(regions):
        return f"the whole model; {len(parts)} of its modules also alone, for calls that the whole does not serve"
    shown = ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")
    return f"{len(parts)} modules alone ({shown})"


def served_lines(stats: dict[str, Any]) -> list[str]:
    """One line per example call: the programs that served it in the converted model."""
    lines = []
    for call in stats.get("served") or () if stats.get("total_replaced") else ():
        name, hits = call["method"] or "forward", call["hits"]
        ran = "the whole model" if list(hits) == [""] else f"{len(hits)} captured modules" if hits else "no module"
        misses = f"; {len(call['misses'])} captured modules ran their original forward" if call["misses"] else ""
        lines.append(f"{name}({call['inputs']}): {ran} ran fused{misses}")
    return lines


def methods_lines(stats: dict[str, Any]) -> list[str]:
    """One line per method other than ``forward``: the fused modules that it runs, or its times if it was converted."""
    lines, original = [], []
    for method in stats.get("methods") or () if stats.get("total_replaced") else ():
        if method.get("timings"):
            lines.append(f"{method['name']}: {speed_line(method)}")
        elif method["fused"]:
            lines.append(f"{method['name']}: runs {', '.join(method['fused'])} fused, for inputs as in forward")
        else:
            original.append(method["name"])
    if original:
        lines.append(f"{', '.join(original)}: the original runs; example_calls={{{original[0]!r}: inputs}} converts it")
    return lines


def not_captured_lines(stats: dict[str, Any]) -> list[str]:
    """One line per reason with its call forms, without the reason that ``nothing_fused_line`` gives."""
    said = "" if stats.get("total_replaced") else stats.get("nothing_fused") or ""
    names: dict[str, list[str]] = {}
    for region in stats.get("regions", []):
        if not region["captured"] and str(region["reason"]) not in said:
            names.setdefault(str(region["reason"]), []).append(region["name"] or "the model")
    return [f"{'; '.join(dict.fromkeys(forms))}: {reason}" for reason, forms in names.items()]


def speedup_line(name: str, speedup: dict[str, Any], named: bool) -> str:
    """The speed-up of a candidate over the original as text, with its ``name`` if ``named``."""
    prefix = f"{name} " if named else ""
    ratio, low, high = (speedup[key] for key in ("ratio", "low", "high"))
    if ratio is None or low is None or high is None or ratio <= 0:  # of a time of 0
        return f"{prefix}the speed-up cannot be determined"
    interval = f"95 % between {low:.2f} and {high:.2f}"
    if not speedup["measurable"]:
        return f"{prefix}no measurable difference ({interval})"
    if ratio < 1:
        return f"{prefix}{1 / ratio:.2f} x SLOWER (speed-up {ratio:.2f}, {interval})"
    return f"{prefix}{ratio:.2f} x faster ({interval})"


def _speed_style(stats: dict[str, Any]) -> str:
    speedup = ((stats.get("timings") or {}).get("speedups") or {}).get("converted")
    if not speedup or not speedup["measurable"] or speedup["ratio"] is None:
        return ""
    return "bold red" if speedup["ratio"] < 1 else "green"
