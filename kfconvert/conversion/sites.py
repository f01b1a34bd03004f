"""The places of each captured graph where a fusion may be put."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..matching import Match, Replacement, Site
from ..region import LiveTensors
from .captures import Captures
from .stages import Stages


def match(captures: Captures, stages: Stages) -> None:
    """Give every capture its sites; those that share weights and function share their fused module."""
    modules: dict[Any, Replacement] = {}
    every = list(captures.every())
    with stages.stage("match", len(every)) as advance:
        for captured in every:
            sites = [_site(match, captured.live, modules) for match in captured.findings.matches]
            captured.sites = [replace(site, region=captured.path) for site in sites]
            for each in captured.findings.left_out:
                site = replace(_site(each.match, captured.live, {}), region=captured.path)
                site.reject(each.reason)
                captured.left_out.append(site)
            advance()


def _site(match: Match, live: LiveTensors, modules: dict[Any, Replacement]) -> Site:
    replacement = match.pattern.build(match, live.tensor)
    kind = repr(replacement.module)
    tensors = tuple((name, id(live.tensor(node))) for _, name, node in replacement.bindings)
    shared = modules.setdefault((match.pattern.name, kind, tensors), replacement)
    if shared is not replacement:
        holders = dict(zip(_holders(replacement), _holders(shared)))
        bindings = tuple((holders[owner], name, node) for owner, name, node in replacement.bindings)
        replacement = replace(replacement, module=shared.module, bindings=bindings)
    return Site(match, replacement, kind)


def _holders(replacement: Replacement) -> list[nn.Module]:
    """The distinct modules that hold the tensors of a replacement, in the order of its bindings."""
    return list(dict.fromkeys(owner for owner, _, _ in replacement.bindings))
