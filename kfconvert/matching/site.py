"""A place in a model where a fusion may be put, and what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pattern import Match, Replacement


@dataclass
class Site:
    """A match, the fused module made for it, and what was decided about it."""

    match: Match
    replacement: Replacement
    # Text that is the same for sites whose modules compute the same function of inputs and those weights they have.
    kind: str
    status: str = "found"  # "applied" or "rejected" once decided
    reason: str | None = None
    strategy: str | None = None
    # Dotted path of the captured module that the site lies in; "" is the model itself.
    region: str = ""
    original_us: float | None = None
    fused_us: float | None = None
    # Root-mean-square error of the chosen strategy over that of the original subgraph, on the site's own inputs.
    error_ratio: float | None = None

    def reject(self, reason: str) -> None:
        self.status, self.reason, self.strategy = "rejected", reason, None

    @property
    def module_path(self) -> str:
        """Dotted path, in the model, of the module that the site belongs to."""
        return ".".join(filter(None, (self.region, self.match.site)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "pattern": self.match.pattern.name,
            "module": self.module_path,
            "region": self.region,
            "status": self.status,
            "reason": self.reason,
            "strategy": self.strategy,
            "original_us": self.original_us,
            "fused_us": self.fused_us,
            "numerics": self.match.pattern.numerics,
        }
