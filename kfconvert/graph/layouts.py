"""In which order the dimensions of values lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .aliases import Aliases


def order_in_memory(value: object) -> list[int] | None:
    """The dimensions of ``value`` from the outermost to the innermost in its memory; None where it is no tensor, or has
    gaps or overlaps, as a view may."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    order = list(range(value.dim()))
    if value.is_contiguous():
        return order
    order.sort(key=value.stride, reverse=True)
    return order if value.permute(order).is_contiguous() else None


def mark_orders(graph: fx.Graph, outputs: list[object]) -> None:
    """Note with the values that ``graph`` returns how ``outputs``, which a model has returned, lie in memory, where a
    trace tells it otherwise: its stand-ins for tensors do not follow all that operators do."""
    returned = graph.output_node().args[0]
    aliases = Aliases(graph)
    classes = [aliases.root(node) for node in {node for node in returned if isinstance(node, fx.Node)}]
    for node, output in zip(returned, outputs) if len(returned) == len(outputs) else ():
        # What shares memory with another output, or an input, lies as that does.
        if not isinstance(node, fx.Node) or classes.count(aliases.root(node)) > 1:
            continue
        if any(member.op == "placeholder" for member in aliases.members(node)):
            continue
        traced, order = order_in_memory(node.meta.get("val")), order_in_memory(output)
        if None not in (traced, order) and traced != order:
            node.meta["kfconvert_order"] = order


def marked_order(node: fx.Node) -> list[int] | None:
    """The order that ``mark_orders`` has noted."""
    return node.meta.get("kfconvert_order")


def mark_view(node: fx.Node) -> None:
    """Note that a reshape stands for a view of the model's code, which fails for some layouts of its argument."""
    node.meta["kfconvert_view"] = True


def is_marked_view(node: fx.Node) -> bool:
    return node.meta.get("kfconvert_view", False)


def mark_laid_out(node: fx.Node) -> None:
    """Note that an input has to lie in memory as it did in the trace."""
    node.meta["kfconvert_laid_out"] = True


def is_laid_out(node: fx.Node) -> bool:
    return node.meta.get("kfconvert_laid_out", False)


def only_splits(before: torch.Size, after: torch.Size) -> bool:
    """Whether a view of the one shape as the other joins no two dimensions: it fails for no strides then."""
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
    return str(size) == str(other)  # of free sizes, the expressions: no question is asked of them
