"""The table of results of several models, one line each."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


def summary(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "fused", "speed", "accuracy", "result"):
        table.add_column(name, overflow="fold")
    for result in results:
        table.add_row(result["name"], *_facts(result["statistics"] or {}), _outcome(result))
    return table


def _facts(stats: dict[str, Any]) -> tuple[str, str, str]:
    if not stats:
        return "", "", ""
    speedup, accuracy = stats["speedup_achieved"], stats["accuracy"] or {}
    return (
        f"{stats['total_replaced']} of {stats['total_found']}",
        "" if speedup is None else f"{speedup:.2f} x",
        {True: "pass", False: "FAIL", None: ""}[accuracy.get("passed")],
    )


def _outcome(result: dict[str, Any]) -> Text:
    if result["error"]:
        return Text(result["error"].removeprefix(result["name"]).lstrip(": "), style="bold red")
    if result["skipped"]:
        return Text(f"skipped: {result['saved']} is there")
    from ..report import given_back  # which imports torch

    if reason := given_back(result["statistics"]):
        return Text(f"given back: {reason}", style="yellow")
    return Text(result["saved"] or "converted", style="green")
