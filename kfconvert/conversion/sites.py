"""The sites of each captured graph that a fusion can replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..capture import Capture
from ..matching import Match, Replacement, Site
from .captures import Captures
from .stages import Stages


def match(captures: Captures, stages: Stages) -> None:
    """Set the sites of each capture; sites of the same modules and function share their fused module. Modules with tied
    weights do not, because the weights may be untied later.

    Sites of a step on a static cache are not shared: the fastest strategy for a prompt may be slow for one token, and a
    fused module has one strategy. The same holds for other steps, if the fused module keeps no copies of weights.
    """
    shared: dict[bool, dict[Any, Replacement]] = {False: {}, True: {}}
    every = list(captures.every())
    with stages.stage("match", len(every)) as advance:
        for captured in every:
            modules = shared[captured.region.takes_static_cache]
            captured.sites = [_site(match, captured, modules) for match in captured.findings.matches]
            captured.left_out = [_site(each.match, captured, {}) for each in captured.findings.left_out]
            for site, each in zip(captured.left_out, captured.findings.left_out):
                site.reject(each.reason)
            advance()


def _site(match: Match, captured: Capture, modules: dict[Any, Replacement]) -> Site:
    live = captured.live
    replacement = match.pattern.build(match, live.tensor)
    kind = repr(replacement.module)
    tensors = tuple((name, *live.origin(node)) for _, name, node in replacement.bindings)
    module: Any = replacement.module
    is_step = module.is_chosen_for_steps and captured.region.call.takes_filled_cache
    shared = modules.setdefault((match.pattern.name, kind, tensors, is_step), replacement)
    if shared is not replacement:
        holders = dict(zip(_holders(replacement), _holders(shared)))
        bindings = tuple((holders[owner], name, node) for owner, name, node in replacement.bindings)
        replacement = replace(replacement, module=shared.module, bindings=bindings)
    return Site(match, replacement, kind, region=captured.path)


def _holders(replacement: Replacement) -> list[nn.Module]:
    """Returns the distinct modules that own the tensors of a replacement, in the order of its bindings."""
    return list(dict.fromkeys(owner for owner, _, _ in replacement.bindings))
