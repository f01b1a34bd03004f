"""The order of dimensions in memory."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .aliases import Aliases


def order_in_memory(value: object) -> list[int] | None:
    """Returns the dimensions of ``value`` from outermost to innermost in memory; None if it is not a tensor, or has
    gaps or overlaps, as views may."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    order = list(range(value.dim()))
    if value.is_contiguous():
        return order
    order.sort(key=value.stride, reverse=True)
    return order if value.permute(order).is_contiguous() else None


def mark_orders(graph: fx.Graph, outputs: list[object]) -> None:
    """Marks the returned values of ``graph`` with the memory layout of ``outputs``, returned by the model, if it
    differs from the trace: fake tensors do not reproduce the strides of all operators."""
    returned = graph.output_node().args[0]
    aliases = Aliases(graph)
    classes = [aliases.root(node) for node in {node for node in returned if isinstance(node, fx.Node)}]
    for node, output in zip(returned, outputs) if len(returned) == len(outputs) else ():
        # A value that shares memory with another output or an input has its layout.
        if not isinstance(node, fx.Node) or classes.count(aliases.root(node)) > 1:
            continue
        if any(member.op == "placeholder" for member in aliases.members(node)):
            continue
        traced, order = order_in_memory(node.meta.get("val")), order_in_memory(output)
        if None not in (traced, order) and traced != order:
            node.meta["kfconvert_order"] = order


def marked_order(node: fx.Node) -> list[int] | None:
    """Returns the order from ``mark_orders``."""
    return node.meta.get("kfconvert_order")


def mark_laid_out(node: fx.Node) -> None:
    """Marks an input that must have the traced memory layout."""
    node.meta["kfconvert_laid_out"] = True


def is_laid_out(node: fx.Node) -> bool:
    return node.meta.get("kfconvert_laid_out", False)


def only_splits(before: torch.Size, after: torch.Size) -> bool:
    """Whether a view from one shape to the other merges no dimensions, so it raises for no strides."""
    sizes = [size for size in after if not _is_one(size)]
    for size in before:
        if _is_one(size):
            continue
        product = 1
        while sizes and not _is_same(product, size):
            product = product * sizes.pop(0)
        if not _is_same(product, size):
            return False
    return not sizes


def _is_one(size: object) -> bool:
    return type(size) is int and size == 1


def _is_same(size: object, other: object) -> bool:
    return str(size) == str(other)  # compares expressions of free sizes without adding guards
