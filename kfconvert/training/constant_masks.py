"""Pass: a causal attention mask that no input determines becomes the flag of the attention.

Compiled models of transformers build a causal mask from positions, which the kernels of attention read in full. With
the flag, they skip half of the products. Keys and values that the model repeats for its groups of heads are passed on
without the copies. The pass works on a graph of Dynamo, before autograd.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ..torch_state import accepts_fewer_heads

_ATTENTION = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)
# Calls without side effects and randomness, by name; masks of transformers consist of them.
_PURE = frozenset(
    "add and and_ arange bool clone contiguous cumsum diff eq expand float full ge getitem gt invert le logical_and "
    "logical_not logical_or lt masked_fill mul ne new_full new_ones new_zeros ones or or_ reshape squeeze sub to "
    "transpose tril triu unsqueeze view where zeros".split()
)
# The most elements of a mask, and of a value that determines it.
MOST_ELEMENTS = 2**30


def simplify_masks(graph: fx.Graph) -> None:
    """Replaces constant masks of attention. The graph is valid after an error, too."""
    kinds: dict[fx.Node, str | None] = {}
    for call in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        given = _ATTENTION.bind(*call.args, **call.kwargs).arguments
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in kinds:
            kinds[mask] = _kind(mask)
        if kinds[mask] == "full" or (kinds[mask] == "causal" and _is_square(given)):
            given |= {"attn_mask": None, "is_causal": kinds[mask] == "causal"}
            tensors = tuple(given.pop(name) for name in ("query", "key", "value"))
            if (ungrouped := _before_groups(call, tensors)) and not given.get("enable_gqa"):
                tensors, given["enable_gqa"] = ungrouped, True
            call.args, call.kwargs = tensors, given
    graph.eliminate_dead_code(lambda node: not _is_pure(node))


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _is_square(given: dict[str, Any]) -> bool:
    return bool(_value(given["query"]).shape[-2] == _value(given["key"]).shape[-2])


def _kind(mask: fx.Node) -> str | None:
    """Returns "causal", "full" for a mask of ones, or None for all other masks."""
    calls = _constant_calls(mask)
    if calls is None:
        return None
    with torch.no_grad(), _disable_current_modes():
        found = _evaluated(calls)
        if found.dtype is not torch.bool:  # it is added to the scores
            kept = found == 0
            if not (kept | (found <= torch.finfo(found.dtype).min)).all():
                return None
            found = kept
        if found.all():
            return "full"
        rows, columns = found.shape[-2:]
        causal = torch.ones((rows, columns), dtype=torch.bool, device=found.device).tril()
        return "causal" if rows == columns and (found == causal).all() else None


def _constant_calls(mask: fx.Node) -> list[fx.Node] | None:
    """Returns the calls that compute ``mask``, in their order. None if an input determines it, or a size that is free,
    or if a call may write to a value, or a value is large."""
    needed, pending = set[fx.Node](), [mask]
    while pending:
        node = pending.pop()
        value = node.meta.get("example_value")
        if not _is_pure(node) or not isinstance(value, Tensor) or "out" in node.kwargs:
            return None
        if not all(type(size) is int for size in value.shape) or value.numel() > MOST_ELEMENTS:
            return None
        needed.add(node)
        pending += [each for each in node.all_input_nodes if each not in needed]
    storages = {_storage(node) for node in needed}
    written = (node.args[0] for node in mask.graph.nodes if _may_write(node))
    if any(isinstance(each, fx.Node) and _storage(each) in storages for each in written):
        return None
    return [node for node in mask.graph.nodes if node in needed]


def _is_pure(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _PURE


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name[2:-2] if name.startswith("__") else name


def _may_write(node: fx.Node) -> bool:
    """Whether the call may write to its first argument."""
    name = _name(node)
    in_place = name.endswith("_") or name == "setitem" or (name.startswith("i") and name[1:] in _IN_PLACE)
    return in_place and not _is_pure(node) and bool(node.args)


_IN_PLACE = frozenset("add and floordiv lshift mod mul or pow rshift sub truediv xor".split())


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _evaluated(calls: list[fx.Node]) -> Tensor:
    """Returns the value of the last of the ``calls``."""
    values: dict[fx.Node, Any] = {}
    for node in calls:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[calls[-1]]


def _before_groups(call: fx.Node, tensors: tuple[fx.Node, fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Returns query, key and value without the copies of ``repeat_kv`` in transformers. None without such copies, and
    where attention with groups would be slow."""
    if not accepts_fewer_heads(_value(call)):
        return None
    key, value = map(_before_repetition, tensors[1:])
    if key is None or value is None or _value(key).shape != _value(value).shape:
        return None
    if _value(tensors[0]).shape[1] != _value(tensors[1]).shape[1]:  # one head of queries is broadcast
        return None
    return tensors[0], key, value


_NEW_DIMENSION = (slice(None), slice(None), None, slice(None), slice(None))


def _before_repetition(node: fx.Node) -> fx.Node | None:
    """Returns ``heads`` for ``heads[:, :, None].expand(...).reshape(...)``, whose second dimension is longer."""
    calls = [node]
    while len(calls) < 4 and isinstance(calls[-1], fx.Node) and calls[-1].args:
        calls.append(calls[-1].args[0])  # type: ignore[arg-type]
    if len(calls) < 4 or not isinstance(heads := calls[-1], fx.Node):
        return None
    if [_name(each) for each in calls[:3]] != ["reshape", "expand", "getitem"] or calls[2].args[1] != _NEW_DIMENSION:
        return None
    batch, count, length, size = _value(heads).shape
    times = _value(node).shape[1] // count
    sizes = [tuple(_value(each).shape) for each in calls[:2]]
    return heads if sizes == [(batch, count * times, length, size), (batch, count, times, length, size)] else None
