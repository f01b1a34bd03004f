"""Computes equal calls once: layers compute the same masks and angles, each for itself."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..graph import Aliases, arguments, aten, draws


def share_calls(graph: fx.Graph, copies: dict[fx.Node, fx.Node], aliases: Aliases) -> None:
    """Replaces the results of ATen calls in ``graph`` with those of equal calls before them. Results that the graph
    returns or writes in place stay separate.

    Args:
        copies: by value of the captured graph, the value in ``graph``.
        aliases: of the captured graph.
    """
    originals = {copy: node for node, copy in copies.items()}
    captured = next(iter(copies)).graph
    returned = {aliases.root(node) for node in captured.output_node().all_input_nodes}
    changed = {aliases.root(each) for node in captured.nodes for each in _statistics(node)}
    known: dict[Any, fx.Node] = {}

    def is_fixed(node: fx.Node) -> bool:
        """Whether nothing writes to the value in place."""
        if node not in originals:
            # Results of fused modules, but not copies in another layout: the graph may write to these.
            return node.op != "call_function" or node.target is operator.getitem
        return not aliases.is_written(originals[node]) and aliases.root(originals[node]) not in changed

    for node in list(graph.nodes):
        original = originals.get(node)
        if original is None or aliases.root(original) in returned or not _is_pure(node):
            continue
        if not all(map(is_fixed, (node, *node.all_input_nodes))):
            continue
        first = known.setdefault(_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm in train mode updates. Its schema does not declare this."""
    if node.target not in (aten.batch_norm.default, aten.instance_norm.default):
        return []
    *_, mean, variance, is_training = arguments(node)[:6]
    return [each for each in (mean, variance) if is_training and isinstance(each, fx.Node)]


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_tensor = isinstance(node.meta.get("val"), Tensor)
    return node.target.namespace == "aten" and is_tensor and not draws(node) and not node.target._schema.is_mutable


def _key(node: fx.Node) -> Any:
    """The same for calls with the same arguments. Numbers of different types, such as 1 and 1.0, are different."""
    values = map_arg((node.args, node.kwargs), lambda argument: f"%{argument.name}")
    return node.target, repr(values)
