"""Removes the repetition of key and value heads before attention with more query heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..graph import Aliases, arguments, aten, fixed_size


def share_heads(graph: fx.Graph) -> None:
    """Makes attention without a mask read the original heads instead of their copies.

    Models of transformers do so in unmasked calls, and repeat the heads if a trace has a mask. On CUDA, only kernels
    for half types support fewer key heads than query heads.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, value, mask, *rest = arguments(node)
        shared = [_before_repeat(each, aliases) for each in (key, value)]
        if mask is not None or None in shared or not _accepts_fewer(query.meta["val"]):
            continue
        names = [argument.name for argument in node.target._schema.arguments[3:]]
        node.args = (query, *shared)
        node.kwargs = {**dict(zip(names, [mask, *rest])), "enable_gqa": True}


def _accepts_fewer(query: Tensor) -> bool:
    size = fixed_size(query.shape[-1])
    return query.is_cpu or (query.dtype.itemsize == 2 and size is not None and size % 8 == 0 and size <= _MOST_SIZE)


# Flash attention and that of cuDNN accept heads up to this size on all GPUs.
_MOST_SIZE = 128


def _before_repeat(node: Any, aliases: Aliases) -> fx.Node | None:
    """The tensor [batch, heads, length, size] whose heads ``node`` repeats consecutively, or None."""
    expanded = _argument(node, aten.reshape.default, aliases)
    unsqueezed = _argument(expanded, aten.expand.default, aliases)
    heads = _argument(unsqueezed, aten.unsqueeze.default, aliases)
    if heads is None or unsqueezed.args[1] != 2:
        return None
    before, wide, after = (each.meta["val"].shape for each in (heads, expanded, node))
    if len(before) != 4 or len(after) != 4 or fixed_size(wide[2]) is None:
        return None
    repeated = (before[0], before[1] * wide[2], before[2], before[3])
    return heads if all(str(size) == str(other) for size, other in zip(after, repeated)) else None


def _argument(node: Any, target: Any, aliases: Aliases) -> fx.Node | None:
    """The argument of ``node`` if it is a call of ``target`` without writes to its result, else None."""
    if not isinstance(node, fx.Node) or node.target is not target or aliases.is_written(node):
        return None
    found = node.args[0]
    return found if isinstance(found, fx.Node) and isinstance(found.meta.get("val"), Tensor) else None
