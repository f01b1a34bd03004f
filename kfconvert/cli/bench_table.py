"""The table of ``kfconvert bench``."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def bench_table(results: list[dict[str, Any]]) -> RenderableType:
    """A table with a section for each timed model and batch size of ``Bench.run``, and notes below the table."""
    from ..profiling import CONVERTED
    from ..report import speedup_line

    timed = [result for result in results if not result["error"]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", overflow="fold")
    for name in ("time (quartiles)", "peak", "x eager (95 %)"):
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[RenderableType] = []
    for result in timed:
        batch = f"batch {result['batch_size']}"
        table.add_section()
        table.add_row(Text(result["name"], style="bold"), batch)
        for row in result["candidates"]:
            table.add_row(*_cells(row, result["timings"]))
        lines = [*result["notes"], *_kept(result["candidates"])]
        if result["speedup_over_compile"]:
            lines.append(f"{CONVERTED} versus torch.compile: {speedup_line('', result['speedup_over_compile'], False)}")
        notes += [Text(f"{result['name']}, {batch}: {line}") for line in lines]
    return Group(*(Text(place) for place in _places(timed)), "", table, "", *notes, *([""] if notes else []))


def _cells(row: dict[str, Any], timings: dict[str, Any]) -> list[str]:
    from ..profiling import bytes_text
    from ..report import timing_text

    name, details = row["name"], row["details"]
    sites = "" if details is None else f", {details['sites']} site{'' if details['sites'] == 1 else 's'}"
    if row["failure"]:
        return [f"  {name}", "left out"]
    times, speedup = timings["timings"][name], timings["speedups"].get(name)
    return [
        f"  {name}{sites}",
        timing_text(times),
        "" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"]),
        "" if speedup is None else "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**speedup),
    ]


def _kept(rows: list[dict[str, Any]]) -> list[str]:
    """The memory that each candidate keeps on the device, if known. A replayed call allocates only its outputs; all
    other memory stays allocated."""
    from ..profiling import bytes_text

    kept = {row["name"]: row["extra_bytes"] for row in rows[1:] if row["extra_bytes"] is not None}
    told = ", ".join(f"{name} {bytes_text(max(0, count))}" for name, count in kept.items())
    return [f"kept on the device besides the weights: {told}"] if told else []


def _places(results: list[dict[str, Any]]) -> list[str]:
    """The environments of the results, one line each."""
    told = "{device}, {threads} CPU threads, torch {torch}, kfconvert {kfconvert}"
    lines = (told.format(**result["environment"]) for result in results)
    return list(dict.fromkeys(line.replace(" 1 CPU threads", " 1 CPU thread") for line in lines))
