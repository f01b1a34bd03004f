"""A conversion by record: what an earlier one decided is done again, and nothing is timed or validated."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..capture import Part, capture, capture_forms
from ..capture.blocks import Repetition, groups
from ..conversion import Conversion, Decision, OwnState
from ..inputs import ExampleCall, build
from ..process import one_at_a_time
from ..runtime import uninstall

# What only a measurement can tell; a replayed model carries the numbers of the conversion that measured them.
_MEASURED = ("accuracy", "timings", "speedup_achieved", "inputs", "example", "parts_left_out", "not_written")


class Replay(Conversion):
    """The steps of a conversion with the decisions of ``statistics``, an earlier ``conversion_stats``.

    Args:
        calls: the arguments of each captured call form, the main one first, as ``input_spec.describe`` gives them.
        parts: the submodules captured on their own: {"modules": paths, "call": arguments, "free": places of sizes}.
    """

    def __init__(self, calls: list[Any], parts: list[dict[str, Any]], statistics: dict[str, Any]):
        super().__init__(False, 0.0, "all", lambda stage, done, total: None, statistics.get("check_weights"))
        self.calls, self.recorded_parts, self.statistics = calls, parts, statistics
        self.asked = frozenset(statistics.get("asked", ()))

    def convert(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Converts ``model`` in place and returns it."""
        with one_at_a_time():
            uninstall(model)
            self.model, self.device = model.to(device).eval(), device
            self.own_state = OwnState(self.model)
            self.repetition = Repetition(self.model)
            self.trace()
            self.match()
            self.select()
            self.replace()
            self.validate()
            self.restore_own_state()
        self.report()
        self.ledger.stats |= {key: self.statistics.get(key) for key in _MEASURED}
        return self.model

    def trace(self) -> None:
        with self._stage("trace", len(self.calls) + len(self.recorded_parts)) as advance:
            calls = [self._call(spec) for spec in self.calls]
            self._take_forms(calls, capture_forms(self.model, calls, self.repetition, advance))
            parts = []
            for recorded in self.recorded_parts:
                parts += self._part(recorded)
                advance()
            self._take_parts(parts)

    def _call(self, spec: Any) -> ExampleCall:
        return ExampleCall(kwargs=build(spec, self.device))

    def _part(self, recorded: dict[str, Any]) -> list[Part]:
        """The modules in parts of one structure; these are several only where the record was not made of this model."""
        modules = {self.model.get_submodule(path): path for path in recorded["modules"]}
        free = {name: [tuple(place) for place in places] for name, places in recorded["free"].items()}
        parts = []
        for first, *others in groups(modules, lambda module: None):
            call = self._call(recorded["call"])
            captured = capture(first, modules[first], call, [free], repetition=self.repetition)
            parts.append(Part([captured, *(captured.alike(modules[module], module) for module in others)]))
        return parts

    def select(self) -> None:
        decisions = defaultdict(list)
        # Where the model itself was captured its sites are in no part.
        listed = [site for site in self.statistics.get("sites", []) if not site.get("region")]
        for decided in (*listed, *self.statistics.get("part_sites", [])):
            decisions[decided.get("region", ""), decided["pattern"], decided["module"]].append(decided)
        for captured in self.every_capture():
            captured.channels_last = self.statistics.get("layout") == "channels_last"
            for site in captured.sites:
                # Several sites may lie in one module: they come in the order of the graph, then and now.
                recorded = decisions[site.region, site.match.pattern.name, site.module_path]
                _decision(recorded.pop(0) if recorded else None).apply_to(site)
                if hasattr(site.replacement.module, "channels_last"):
                    site.replacement.module.channels_last = captured.channels_last


def _decision(recorded: dict[str, Any] | None) -> Decision:
    if recorded is None:
        return Decision(None, "not there when the model was first converted")
    applied = recorded["status"] == "applied"
    strategy, reason = (recorded["strategy"], None) if applied else (None, recorded["reason"])
    return Decision(strategy, reason, recorded["original_us"], recorded["fused_us"])
