"""``report.html``: the report of an artifact for readers."""

from __future__ import annotations

from typing import Any

from ..report import page


def report_of(record: dict[str, Any]) -> str:
    """Returns the text of ``report.html`` for the content of ``kfconvert.json``."""
    recipe = record["recipe"] or {}
    name, weights = (text if isinstance(text := recipe.get(key), str) else "" for key in ("name", "weights"))
    return page(record["statistics"], name, weights)
