"""Finds Patterns in a graph, rejects matches that must not be fused, and resolves overlaps, for any fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from ..graph import Aliases, Op, location, module_path, roots, unify
from .pattern import Findings, LeftOut, Match, NearMiss, Pattern


class _Judged(NamedTuple):
    """A match. If it must not be fused: the reason, and the call that prevents it (None: the match itself)."""

    match: Match
    reason: str | None
    blocker: fx.Node | None


def find(
    graph: fx.Graph, patterns: Iterable[Pattern], refusal: Callable[[Match], str | None] = lambda match: None
) -> Findings:
    """Returns all matches of ``patterns`` in ``graph``. If two overlap, the match with more calls wins.

    Args:
        refusal: returns the reason to exclude a match, or None. Matches that overlap with an excluded one may win.
    """
    patterns = list(patterns)
    by_root: dict[Any, list[Pattern]] = {}
    called = {node.target for node in graph.nodes}
    for pattern in patterns:
        for target in roots(pattern.tree) if pattern.required <= called else ():
            by_root.setdefault(target, []).append(pattern)
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        for pattern in by_root.get(node.target, ()) if node.op == "call_function" else ():
            judged = _match_at(pattern, node, aliases)
            if judged is not None:
                found.append(judged)
    wanted = [judged for judged in found if refusal(judged.match) is None]
    chosen, misses = _settled(wanted, order)
    left_out = []
    if len(wanted) < len(found):
        every, _ = _settled(found, order)
        left_out = [LeftOut(match, reason) for match in every if (reason := refusal(match)) is not None]
    covered = [*chosen, *(each.match for each in left_out)]
    return Findings(chosen, _near_misses(graph, patterns, covered, misses), left_out)


def _settled(found: list[_Judged], order: dict[fx.Node, int]) -> tuple[list[Match], list[_Judged]]:
    """Fusible matches without overlaps, in graph order, and matches that must not be fused."""
    single = [judged for judged in found if judged.match.pattern.siblings is None]
    occurrences: dict[str, list[_Judged]] = {}
    for judged in found:
        if judged.match.pattern.siblings is not None:
            occurrences.setdefault(judged.match.pattern.name, []).append(judged)
    matches, misses = _allowed(single), [judged for judged in single if judged.reason is not None]
    settled = [match for match in _without_overlaps(matches, order) if len(match.nodes) > 1]
    for alike in occurrences.values():
        # A match of the same nodes, of a sibling alone, covers less than the siblings.
        own = {frozenset(judged.match.nodes) for judged in alike}
        several = {node for match in settled if frozenset(match.nodes) not in own for node in match.nodes}
        for group in _siblings([judged for judged in alike if several.isdisjoint(judged.match.nodes)]):
            whole = _merged([judged.match for judged in group])
            misses += [judged._replace(match=whole) for judged in group if judged.reason is not None]
            if len(_allowed(group)) > 1:
                matches.append(_merged(_allowed(group)))
    return sorted(_without_overlaps(matches, order), key=lambda match: order[match.root]), misses


def _near_misses(
    graph: fx.Graph, patterns: list[Pattern], chosen: list[Match], misses: list[_Judged]
) -> list[NearMiss]:
    """Rejected matches that cover more than the chosen one, then anchors without a match."""
    covered = {node: len(match.nodes) for match in chosen for node in match.nodes}
    fused_sites = {match.site for match in chosen}
    found, reported = [], set()
    for match, reason, blocker in misses:
        anchor = match.captures[match.pattern.anchor]
        if len(match.nodes) > covered.get(anchor, 0) and anchor not in reported:
            reported.add(anchor)
            found.append(NearMiss(match.pattern.name, match.site, reason, _place(blocker, anchor)))
    anchors = _anchors(patterns)
    for node in graph.nodes:
        if node in covered or node in reported or module_path(node) in fused_sites:
            continue
        name = next((name for tree, name in anchors.get(node.target, ()) if next(unify(tree, node), None)), None)
        if name is not None:
            place = _place(next(iter(node.users), None), node)
            found.append(NearMiss(name, module_path(node), _users_of(node), place))
    return found


def _place(blocker: fx.Node | None, anchor: fx.Node) -> str | None:
    return (location(blocker) if blocker is not None else None) or location(anchor)


def _match_at(pattern: Pattern, node: fx.Node, aliases: Aliases) -> _Judged | None:
    """The first fusible occurrence with this root, else the first one; None if there is none."""
    refused = None
    for binding in unify(pattern.tree, node):
        match = Match(pattern, binding.nodes, binding.captures)
        judged = _Judged(match, *(_never_allowed(match, aliases) or (pattern.refusal(match), None)))
        if judged.reason is None:
            return judged
        refused = refused or judged
    return refused


def _allowed(found: list[_Judged]) -> list[Match]:
    return [judged.match for judged in found if judged.reason is None]


def _siblings(found: list[_Judged]) -> list[list[_Judged]]:
    """Groups of two or more occurrences of a pattern that read the same value."""
    groups: dict[fx.Node, list[_Judged]] = {}
    for judged in found:
        groups.setdefault(judged.match.captures[judged.match.pattern.siblings], []).append(judged)
    return [group for group in groups.values() if len(group) > 1]


def _merged(members: list[Match]) -> Match:
    nodes = tuple(node for match in members for node in match.nodes)
    return Match(members[0].pattern, nodes, members[0].captures, tuple(members))


def _never_allowed(match: Match, aliases: Aliases) -> tuple[str, fx.Node] | None:
    """The reason why no pattern may fuse this match, and the responsible node."""
    kept = {match.captures[name] for name in match.pattern.kept}
    for node in match.nodes[1:]:
        others = [user for user in node.users if user not in match.nodes]
        if others and node not in kept:
            return f"the value of {node.target} is also used by {_describe(others[0])}", others[0]
    tensors = [value for value in match.captures.values() if isinstance(value, fx.Node)]
    calls = {call.name for call in match.pattern.calls if call.name is not None}
    for name, value in match.captures.items():
        if name not in calls and isinstance(value, fx.Node) and value in match.nodes:
            return f"the value of {value.target} is used twice in the match", value
    for node in match.nodes:
        for value in node.all_input_nodes:
            # The methods of its class may compute something different from the kernels.
            if (kind := value.meta.get("kfconvert_class")) is not None:
                return f"{value.name} is a {kind.__name__}, not a plain tensor", node
    for node in (*match.nodes, *tensors):
        if aliases.is_written(node):
            return f"the storage of {node.name} is written in place in this graph", node
    return None


def _without_overlaps(matches: list[Match], order: dict[fx.Node, int]) -> list[Match]:
    taken: set[fx.Node] = set()
    chosen = []
    for match in sorted(matches, key=lambda match: (-len(match.nodes), order[match.root])):
        if taken.isdisjoint(match.nodes):
            taken.update(match.nodes)
            chosen.append(match)
    return chosen


def _anchors(patterns: list[Pattern]) -> dict[Any, list[tuple[Op, str]]]:
    """The calls that identify sites, by operator, each with its simplest pattern."""
    anchors: dict[Any, list[tuple[Op, str]]] = {}
    for pattern in patterns:
        for call in pattern.calls:
            if call.name == pattern.anchor:
                known = anchors.setdefault(call.target, [])
                if all(call != other for other, _ in known):
                    known.append((call, pattern.name))
    return anchors


def _users_of(node: fx.Node) -> str:
    users = list(node.users)
    if not users:
        return "its value is not used"
    return f"its value goes to {', '.join(dict.fromkeys(_describe(user) for user in users[:3]))}"


def _describe(node: fx.Node) -> str:
    if node.op == "output":
        return "the model's output"
    path = module_path(node)
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.name
    return f"{name} in {path}" if path else name
