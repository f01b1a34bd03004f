"""Operators that return a view or a copy, depending on the memory layout of their argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .aliases import Aliases, aliased_arguments, written_arguments
from .layouts import only_splits
from .trees import arguments, aten

# Operators that return a view if the strides of the argument allow it, else a copy.
_RESHAPES = (aten.reshape, aten.reshape_as, aten.flatten, aten.ravel)
# Operators that return a view of elements that depend on strides.
_OF_MEMORY = (aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default)


def written_by_layout(graph: fx.Graph) -> list[fx.Node]:
    """Returns the operators for which the argument's layout decides whether a write is visible: the graph writes their
    argument or result in place, and reads the other later."""
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    return [
        node
        for node in graph.nodes
        if aliases.is_written(node) and _shares_by_layout(node) and _is_seen(node, aliases.members(node), order)
    ]


def _shares_by_layout(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _RESHAPES:
        return not only_splits(node.args[0].meta["val"].shape, node.meta["val"].shape)
    if packet is aten.to:
        before, after = (each.meta["val"] for each in (node.args[0], node))
        is_same = before.dtype is after.dtype and before.device == after.device and not _given(node, "copy")
        return is_same and is_to_memory_format(node)
    return packet is aten.contiguous or node.target in _OF_MEMORY


def is_to_memory_format(node: fx.Node) -> bool:
    """Whether ``node`` converts to a memory format, which returns the argument if it already has the format."""
    is_conversion = getattr(node.target, "overloadpacket", None) is aten.to
    return is_conversion and _given(node, "memory_format") not in (None, torch.preserve_format)


def _given(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]
    return arguments(node)[names.index(name)]


def _is_seen(node: fx.Node, members: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether either the result of ``node`` or one of ``members``, which may share memory with it, is written, and the
    other is read later."""
    made = {node}
    for member in members:
        aliased = aliased_arguments(member)
        if not made.isdisjoint(aliased or member.all_input_nodes):
            made.add(member)
    sides = made, set(members) - made
    writers = [(user, each) for each in members for user in each.users if each in written_arguments(user)]
    return any(
        order[user] >= order[writer]
        for writer, written in writers
        if order[writer] > order[node]
        for each in sides[written in made]
        for user in each.users
    )
