"""Attention written out in matrix products and a softmax: ``softmax(q k^T * scale + masks) v``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import AnyNumber, Either, Op, Tree, Var, aten, constant_value, fixed_size
from ..matching import Match, Pattern, Replacement
from ..modules import FusedAttention, MaskTerm
from .attention_cases import CASES
from .checks import dtype_refusal, sizes, traced
from .masks import least, saturation, sum_bound
from .skeletons import cast

# A fill value below this hides scores, because no score is that low.
_HIDING = -1e9


def _scaled(tree: Tree, name: str) -> Either:
    """``tree``, with or without a factor or divisor."""
    multiplied = Op(aten.mul.Tensor, tree, AnyNumber(f"{name}_factor"))
    return Either(multiplied, Op(aten.div.Tensor, tree, AnyNumber(f"{name}_divisor")), tree)


def _reshaped(tree: Tree, name: str) -> Either:
    return Either(Op(aten.reshape.default, tree, Var(name), name=name.replace("_shape", "")), tree)


def _hidden(tree: Tree) -> Either:
    """``tree``, with or without scores filled with a number by a boolean mask."""
    return Either(
        Op(aten.masked_fill.Scalar, tree, Var("hidden"), AnyNumber("fill")),
        Op(aten.masked_fill.Tensor, tree, Var("hidden"), Var("fill")),
        Op(aten.where.ScalarOther, Var("shown"), tree, AnyNumber("fill")),
        Op(aten.where.self, Var("shown"), tree, Var("fill")),
        Op(aten.where.ScalarSelf, Var("hidden"), AnyNumber("fill"), tree),
        Op(aten.where.self, Var("hidden"), Var("fill"), tree),
        tree,
    )


def _masked(tree: Tree, *names: str) -> Tree:
    """``tree`` with up to ``len(names)`` masks added."""
    for name in names:
        tree = Either(Op(aten.add.Tensor, tree, Var(name)), tree)
    return tree


_KEY = Either(
    _scaled(Op(aten.transpose.int, _scaled(Var("k"), "k"), AnyNumber("dim0"), AnyNumber("dim1")), "kt"),
    _scaled(Var("kt"), "kt"),
)
_QUERY = _scaled(Var("q"), "q")
_PRODUCT = _scaled(Op(aten.matmul.default, _QUERY, _KEY, name="scores"), "scores")
_ADDED_PRODUCT = Op(aten.baddbmm.default, Var("inner"), _QUERY, _KEY, Var("beta"), Var("alpha"), name="scores")
_SCORES = Either(_ADDED_PRODUCT, _masked(_PRODUCT, "inner"))
_MASKED = _reshaped(_masked(_hidden(_reshaped(_SCORES, "split_shape")), "outer", "last"), "joined_shape")
_SOFTMAX = Op(aten.softmax.int, cast(_MASKED, "wide"), AnyNumber("dim"), Var("dtype"), name="softmax")
_UNKNOWN = Op(aten.softmax.int, Var("unknown"), AnyNumber("dim"), Var("dtype"), name="softmax")
_WEIGHTS = _reshaped(cast(Either(_SOFTMAX, _UNKNOWN), "narrow"), "weights_shape")
_TREE = Op(aten.matmul.default, _WEIGHTS, Var("v"), name="result")


def _scale(captures: dict[str, Any]) -> float:
    scale = float(captures.get("alpha", 1))
    for name in ("q", "k", "kt", "scores"):
        scale *= captures.get(f"{name}_factor", 1)
        scale /= captures.get(f"{name}_divisor", 1)
    return scale


def _key(captures: dict[str, Any]) -> fx.Node:
    return captures["k"] if "k" in captures else captures["kt"]


def _split(captures: dict[str, Any]) -> int | None:
    """The number of parts into which the first dimension of the scores is split before masks are added; None if there
    is no split, or for a free size."""
    return fixed_size(traced(captures["split"]).shape[1]) if "split" in captures else None


def _masks(captures: dict[str, Any]) -> list[tuple[fx.Node, MaskTerm]]:
    """The tensors of the mask terms that are added to the scores, in order."""
    terms = []
    scores, dtype = captures["scores"], traced(captures["q"]).dtype
    if "inner" in captures and captures.get("beta", 1) != 0:
        inner = captures["inner"]
        split = "split" in captures and len(sizes(inner)) == len(sizes(scores)) and sizes(inner)[0] == sizes(scores)[0]
        terms.append((inner, MaskTerm(split=split)))
    if "fill" in captures:
        hidden, fill = "hidden" in captures, constant_value(captures["fill"])
        if fill > saturation(dtype):
            # Low enough to absorb any score, so a fully hidden row is uniform, as in the original.
            fill = torch.finfo(dtype).min / 2
        terms.append((captures["hidden" if hidden else "shown"], MaskTerm(fill, hidden)))
    return terms + [(captures[name], MaskTerm()) for name in ("outer", "last") if name in captures]


def _refusal(match: Match) -> str | None:
    captures = match.captures
    if "unknown" in captures:
        return "the scores are not a product of queries and keys with a fixed scale and masks added"
    return _shape_refusal(captures) or _mask_refusal(captures)


def _shape_refusal(captures: dict[str, Any]) -> str | None:
    q, k, v, scores = captures["q"], _key(captures), captures["v"], captures["scores"]
    if not all(isinstance(node, fx.Node) for node in (q, k, v)):
        return "a constant is multiplied, not a tensor"
    rank = len(sizes(scores))
    if rank not in ((3, 4) if "split" in captures else (3, 4, 5)) or len(sizes(q)) != rank or len(sizes(k)) != rank:
        return f"queries of {len(sizes(q))} and keys of {len(sizes(k))} dimensions"
    if sizes(q)[:-2] != sizes(scores)[:-2]:
        return "the queries are broadcast over the keys"
    if "k" in captures and {captures["dim0"] % rank, captures["dim1"] % rank} != {rank - 2, rank - 1}:
        return "the transposed dimensions of the keys are not the last two"
    if captures["dim"] not in (-1, len(sizes(captures["softmax"])) - 1):
        return "the softmax is not over the keys"
    if not math.isfinite(_scale(captures)) or _scale(captures) <= 0:
        return f"the scale is {_scale(captures)}"
    for name in ("wide", "dtype"):
        if captures.get(name) not in (None, torch.float32, torch.float64, traced(q).dtype):
            return f"the softmax is taken in {captures[name]}"
    return _split_refusal(captures) or dtype_refusal(q, k, v, captures["result"])


def _split_refusal(captures: dict[str, Any]) -> str | None:
    scores, softmax, result, v = (sizes(captures[name]) for name in ("scores", "softmax", "result", "v"))
    if "split" not in captures:
        if "joined" in captures or "weights" in captures or len(v) != len(scores):
            return "the scores are reshaped"
        return "the masks or values have a larger batch" if softmax != scores or result[:-2] != scores[:-2] else None
    split = sizes(captures["split"])
    if len(split) != len(scores) + 1 or split[2:] != scores[1:] or _split(captures) is None:
        return "the scores are not reshaped by splitting the first dimension"
    joined = sizes(captures["weights"]) if "weights" in captures else softmax
    first = 1 if len(joined) == len(scores) else -2
    if joined[first:] != scores[first:] or len(joined) not in (len(scores), len(split)):
        return "the attention weights have another shape than the scores"
    if len(joined) != len(v) or len(result) != len(v) or (len(scores) == 4 and len(v) != 4):
        return "the values have other dimensions than the attention weights"
    masked = sizes(captures["joined"].args[0]) if "joined" in captures else softmax
    keys = sizes(_key(captures))
    if masked != split or v[:-2] != joined[:-2] or keys[:-2] != scores[:-2]:
        return "the masks, keys or values are not broadcast like the scores"
    return None


def _fill_refusal(captures: dict[str, Any], dtype: torch.dtype) -> str | None:
    """None if filling scores with ``fill`` is equivalent to adding it, also for fully hidden rows."""
    fill = constant_value(captures["fill"]) if "fill" in captures else -math.inf
    if fill == -math.inf:
        return None
    if fill is None or not torch.finfo(dtype).min <= fill <= _HIDING or dtype is torch.float16:
        what = "a tensor" if fill is None else fill
        return f"filling scores with {what} differs from adding a mask if a whole row is hidden"
    if fill > saturation(dtype) and ("outer" in captures or "last" in captures):
        return f"a mask is added after scores are filled with {fill}"
    if "inner" in captures and least(captures["inner"], dtype) <= saturation(dtype):
        return f"a mask is added before scores are filled with {fill}"
    return None


def _mask_refusal(captures: dict[str, Any]) -> str | None:
    dtype = traced(captures["q"]).dtype
    if captures.get("beta", 1) not in (0, 1):
        return f"the mask is multiplied by {captures['beta']}"
    if refusal := _fill_refusal(captures, dtype):
        return refusal
    for mask, term in _masks(captures):
        if not isinstance(mask, fx.Node):
            return "a constant is added to the scores"
        if traced(mask).dtype is not (torch.bool if term.fill is not None else dtype):
            return f"a mask of dtype {traced(mask).dtype}"
    added = [least(mask, dtype, learned=True) for mask, term in _masks(captures) if term.fill is None]
    if dtype is torch.float16 and min(added, default=0.0) < saturation(dtype):
        return "a mask in float16 may round the scores of fully hidden rows"
    return None


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures, masks = match.captures, _masks(match.captures)
    terms, dtype = tuple(term for _, term in masks), traced(captures["q"]).dtype
    bounds = [least(mask, dtype) if term.fill is None else term.fill for mask, term in masks]
    saturated = any(bound < saturation(dtype) for bound in bounds)
    empty = math.isinf(reduce(lambda total, bound: sum_bound(total, bound, dtype), bounds, 0.0))
    module = FusedAttention(_scale(captures), "k" not in captures, terms, _split(captures), saturated, empty)
    inputs = (captures["q"], _key(captures), captures["v"], *(mask for mask, _ in masks))
    return Replacement(module, inputs, (), (match.root,))


PATTERNS = (Pattern(name="attention", tree=_TREE, anchor="softmax", refusal=_refusal, build=_build, cases=CASES),)
