"""Log records for the decisions of a conversion, in the logger ``kfconvert``."""

from __future__ import annotations

import logging
from typing import Any

from ..graph import at
from ..report import accuracy_line, memory_line, speed_line

_LOG = logging.getLogger(__name__)


def log_decisions(stats: dict[str, Any]) -> None:
    """Log ``conversion_stats``: each site at DEBUG, the model as a whole at INFO."""
    name = stats["model"]
    for region in stats["regions"]:
        where = ".".join(filter(None, (name, region["module"])))
        called = f" as called with {region['name']}" if region["name"] not in ("", region["module"]) else ""
        if region["captured"]:
            _LOG.info("%s: captured%s", where, called)
        else:
            _LOG.info("%s: not captured%s: %s%s", where, called, region["reason"], at(region.get("location")))
    # If the model itself was not captured, its sites belong to parts.
    for site in (*(site for site in stats["sites"] if not site["region"]), *stats["part_sites"]):
        where = ".".join(filter(None, (name, site["module"])))
        decision = f"fused ({site['strategy']})" if site["status"] == "applied" else f"not fused, {site['reason']}"
        _LOG.debug("%s: %s: %s", where, site["pattern"], decision)
    _LOG.info("%s: %d of %d sites fused", name, stats["total_replaced"], stats["total_found"])
    for what, line in (("accuracy", accuracy_line), ("speed", speed_line), ("memory", memory_line)):
        if told := line(stats):
            _LOG.info("%s: %s %s", name, what, told)
    if stats["given_back"]:
        _LOG.info("%s: the original is returned: %s", name, stats["given_back"])
