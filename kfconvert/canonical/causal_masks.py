"""Replaces causal masks of attention by its flag: kernels skip half of the products, and read no mask."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import Aliases, arguments, aten, same_sizes
from .attention_calls import change_attention
from .masks import is_true
from .positions import positions


def spell_causal_masks(graph: fx.Graph) -> None:
    """Removes causal masks of attention with as many queries as keys, and sets ``is_causal``."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, _, mask, _, causal, *_ = arguments(node)
        if not isinstance(mask, fx.Node) or causal or not _is_causal(mask, aliases):
            continue
        sizes = [mask.meta["val"].shape[-2], *(each.meta["val"].shape[-2] for each in (query, key))]
        if all(statically_known_true(size == mask.meta["val"].shape[-1]) for size in sizes):
            change_attention(node, attn_mask=None, is_causal=True)


def _is_causal(node: Any, aliases: Aliases) -> bool:
    """Whether a boolean mask is true where the position of the key is at most that of the query. A mask of one row or
    column that is broadcast is not causal."""
    if not isinstance(node, fx.Node) or aliases.is_written(node):
        return False
    if node.target is aten.expand.default:
        return _is_causal(node.args[0], aliases) and same_sizes(node.args[0], node, -1, -2)
    if node.target is aten.__and__.Tensor:
        one, other = node.args
        pairs = (one, other), (other, one)
        return any(
            _is_causal(a, aliases) and same_sizes(a, node, -1, -2) and isinstance(b, fx.Node) and is_true(b, aliases)
            for a, b in pairs
        )
    if node.target is aten.tril.default:
        return len(node.args) == 1 and is_true(node.args[0], aliases)
    if node.target not in (aten.le.Tensor, aten.ge.Tensor):
        return False
    keys, queries = node.args if node.target is aten.le.Tensor else reversed(node.args)
    along_keys, along_queries = (positions(each, aliases) for each in (keys, queries))
    if along_keys is None or along_queries is None or (along_keys[0], along_queries[0]) != (-1, -2):
        return False
    if not same_sizes(keys, node, -1) or not same_sizes(queries, node, -2):
        return False
    return bool(statically_known_true(along_keys[1] == along_queries[1]))
