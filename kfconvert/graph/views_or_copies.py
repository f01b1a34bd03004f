"""Operators that return a view or a copy, depending on the memory layout of their argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .aliases import Aliases
from .memory_order import only_splits
from .schemas import schema_of
from .trees import arguments, aten

# Operators that return a view if the strides of the argument allow it, else a copy.
_RESHAPES = (aten.reshape, aten.reshape_as, aten.flatten, aten.ravel)
# Operators that read other values from another layout, or raise an error for it.
LAYOUT_READERS = {
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default, aten.view.dtype,
    aten.view_as_complex.default, aten.view_as_real.default,
}  # fmt: skip


def written_by_layout(graph: fx.Graph, aliases: Aliases) -> list[fx.Node]:
    """Returns the operators for which the argument's layout decides whether a write is visible: the graph writes their
    argument or result in place."""
    return [node for node in graph.nodes if aliases.is_written(node) and _shares_by_layout(node)]


def _shares_by_layout(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _RESHAPES:
        return not only_splits(node.args[0].meta["val"].shape, node.meta["val"].shape)
    if packet is aten.to:
        before, after = (each.meta["val"] for each in (node.args[0], node))
        is_same = before.dtype is after.dtype and before.device == after.device and not _given(node, "copy")
        return is_same and is_to_memory_format(node)
    return packet is aten.contiguous or node.target in LAYOUT_READERS


def is_to_memory_format(node: fx.Node) -> bool:
    """Whether ``node`` converts to a memory format, which returns the argument if it already has the format."""
    is_conversion = getattr(node.target, "overloadpacket", None) is aten.to
    return is_conversion and _given(node, "memory_format") not in (None, torch.preserve_format)


def _given(node: fx.Node, name: str) -> Any:
    return arguments(node)[schema_of(node.target).names.index(name)]
