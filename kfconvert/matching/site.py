"""A place in a model where a fusion may be applied, and the decision about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pattern import Match, Replacement


@dataclass
class Site:
    """A match, its fused module, and the decision about it."""

    match: Match
    replacement: Replacement
    # A text that is equal for sites whose modules compute the same function of inputs and weights.
    kind: str
    status: str = "found"  # "applied" or "rejected" once decided
    reason: str | None = None
    strategy: str | None = None
    # Dotted path of the captured module with the site; "" is the model itself.
    region: str = ""
    original_us: float | None = None
    fused_us: float | None = None
    # Root-mean-square error of the chosen strategy divided by the original subgraph's, on the site's inputs.
    error_ratio: float | None = None

    def reject(self, reason: str) -> None:
        self.status, self.reason, self.strategy = "rejected", reason, None

    @property
    def module_path(self) -> str:
        """Returns the dotted path of the site's module in the model."""
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
