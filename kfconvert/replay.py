"""A conversion by record: what an earlier one decided is done again, and nothing is timed or validated."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from .conversion import Conversion
from .inputs import ExampleCall
from .selector import Decision

# What only a measurement can tell; a replayed model carries the numbers of the conversion that measured them.
_MEASURED = ("accuracy", "timings", "speedup_achieved")


class Replay(Conversion):
    """The steps of a conversion with the decisions of ``statistics``, an earlier ``conversion_stats``.

    Args:
        calls: one example call for each captured call form, the main one first.
    """

    def __init__(self, calls: list[ExampleCall], statistics: dict[str, Any]):
        super().__init__(False, 0.0, "all", lambda stage, done, total: None)
        self.calls, self.statistics = calls, statistics

    def convert(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Converts ``model`` in place and returns it."""
        self.prepare(model, None, self.calls[0].kwargs, device, None, inplace=True)
        self.trace()
        self.match()
        self.select()
        self.replace()
        self.validate()
        self.report()
        self.guarded.stats |= {key: self.statistics.get(key) for key in _MEASURED}
        return self.model

    def trace(self) -> None:
        with self._stage("trace", len(self.calls)) as advance:
            for call in self.calls:
                self._capture(call)
                advance()

    def select(self) -> None:
        for capture in self.captures:
            capture.channels_last = self.statistics.get("layout") == "channels_last"
            decisions = defaultdict(list)
            for decided in self.statistics.get("sites", []):
                decisions[decided["pattern"], decided["module"]].append(decided)
            for site in capture.sites:
                # Several sites may lie in one module: they come in the order of the graph, then and now.
                recorded = decisions[site.match.pattern.name, site.match.site]
                _decision(recorded.pop(0) if recorded else None).apply_to(site)
                if hasattr(site.replacement.module, "channels_last"):
                    site.replacement.module.channels_last = capture.channels_last


def _decision(recorded: dict[str, Any] | None) -> Decision:
    if recorded is None:
        return Decision(None, "not there when the model was first converted")
    applied = recorded["status"] == "applied"
    strategy, reason = (recorded["strategy"], None) if applied else (None, recorded["reason"])
    return Decision(strategy, reason, recorded["original_us"], recorded["fused_us"])
