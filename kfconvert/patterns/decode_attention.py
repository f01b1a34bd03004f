"""Attention of one new token over a static cache of keys and values: rotation, writes and attention in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Tree, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedDecodeAttention
from .cases import Inputs, Make, net
from .checks import dtype_refusal, sizes, traced
from .rotary import rotary_refusal, rotary_tree, turned


def _attended(q: Tree, k: Tree) -> Op:
    def cached(name: str, cache: str, new: Tree) -> Either:
        written = Op(aten.index_copy.default, Var(cache), 2, Var("position"), new, name=name)
        widened = Op(aten.expand.default, Op(aten.unsqueeze.default, written, 2), Var(f"{name}_wide_shape"))
        return Either(Op(aten.reshape.default, widened, Var(f"{name}_shape"), name=f"{name}_repeated"), written)

    return Op(
        aten.scaled_dot_product_attention.default,
        q,
        cached("new_keys", "keys", k),
        cached("new_values", "values", Var("v")),
        Var("mask"),
        0.0,
        False,
        Var("scale"),
        Var("shares_heads"),
        name="result",
    )


_TREE = Either(_attended(rotary_tree("q"), rotary_tree("k")), _attended(Var("q"), Var("k")))


def _refusal(match: Match) -> str | None:
    captures = match.captures
    q, k, v, keys, values = (captures[name] for name in ("q", "k", "v", "keys", "values"))
    if any(len(sizes(each)) != 4 for each in (q, k, v, keys, values)):
        return "the cache does not have the shape (batch, heads, positions, size)"
    batch, heads, rows, size = sizes(q)
    shared = sizes(keys)[1]
    if rows != "1" or sizes(captures["position"]) != ["1"]:
        return "there is, or may be, more than one new token"
    if sizes(k) != [batch, shared, "1", size] or sizes(v) != sizes(k) or sizes(values) != sizes(keys):
        return "the shapes of keys and values do not match the cache"
    if not heads.isdigit() or not shared.isdigit() or not size.isdigit() or int(heads) % int(shared):
        return "it has no fixed numbers of heads"
    if traced(captures["position"]).dtype != torch.long:
        return "its position is not int64"
    refusal = _mask_refusal(captures) or _repeat_refusal(captures, int(heads) // int(shared))
    if refusal or "cos" not in captures:
        return refusal or dtype_refusal(q, k, v, keys, values)
    cos, sin = captures["cos"], captures["sin"]
    for name in ("q", "k"):
        refusal = refusal or rotary_refusal(captures, name)
    if refusal is None and any(sizes(each)[1:] != ["1", "1", size] for each in (cos, sin)):
        refusal = "its angles differ by head"
    return refusal or dtype_refusal(q, k, v, keys, values, cos, sin)


def _mask_refusal(captures: dict[str, Any]) -> str | None:
    mask, q, keys = captures["mask"], captures["q"], captures["keys"]
    if mask is None:
        return None
    if traced(mask).dtype not in (torch.bool, traced(q).dtype):
        return "its mask has another dtype"
    expected = (*sizes(q)[:3], sizes(keys)[2])
    fits = len(sizes(mask)) == 4 and all(size in ("1", other) for size, other in zip(sizes(mask), expected))
    return None if fits else "its mask has another shape"


def _repeat_refusal(captures: dict[str, Any], times: int) -> str | None:
    """The reason why heads of keys and values are not each repeated ``times`` times, or None."""
    for name in ("new_keys", "new_values"):
        repeated = captures.get(f"{name}_repeated")
        if repeated is None:
            if times > 1 and not captures["shares_heads"]:
                return "there are more heads of queries than of keys"
            continue
        before, after = sizes(captures[name]), sizes(repeated)
        wide = repeated.args[0].meta["val"].shape
        if str(wide[2]) != str(times) or after != [before[0], str(int(before[1]) * times), *before[2:]]:
            return "heads of keys are repeated in another way"
    return None


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures = match.captures
    scale = captures["scale"]
    if scale is None:
        scale = 1 / math.sqrt(traced(captures["q"]).shape[3])
    inputs = [captures[name] for name in ("q", "k", "v", "keys", "values", "position")]
    inputs += [captures[name] for name in ("mask", "cos", "sin") if captures.get(name) is not None]
    module = FusedDecodeAttention(float(scale), captures["mask"] is not None, "cos" in captures)
    outputs = match.root, captures["new_keys"], captures["new_values"]
    return Replacement(module, tuple(inputs), (), outputs)


def _step(shared: int = 2, masked: bool = True, rotated: bool = True, scale: float | None = None) -> Make:
    """A token with 4 heads of size 8 and ``shared`` heads of keys, with a cache of 12 positions."""
    times = 4 // shared

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor,
                cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if rotated:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        place = torch.tensor([5], device=q.device)
        keys, values = keys.index_copy(2, place, k), values.index_copy(2, place, v)
        batch, shared, places, size = keys.shape
        wide = keys, values
        if times > 1:
            shape, flat = (batch, shared, times, places, size), (batch, shared * times, places, size)
            wide = keys[:, :, None].expand(shape).reshape(flat), values[:, :, None].expand(shape).reshape(flat)
        seen = mask if masked else None
        y = nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=seen, scale=scale)
        return y, keys, values

    return net(forward)


def _inputs(shared: int = 2, rows: int = 1, angles: int = 1) -> Inputs:
    def made() -> tuple[Tensor, ...]:
        cache, new = ([torch.randn(3, shared, places, 8) for _ in range(2)] for places in (12, 1))
        mask = torch.rand(3, 1, 1, 12) < 0.7
        mask[..., 5] = True
        cos, sin = torch.randn(3, angles, 1, 8), torch.randn(3, angles, 1, 8)
        return torch.randn(3, 4, rows, 8), *new, *cache, mask, cos, sin

    return made


PATTERNS = (
    Pattern(
        name="decode_attention",
        tree=_TREE,
        anchor="new_keys",
        refusal=_refusal,
        build=_build,
        kept=frozenset(("new_keys", "new_values")),
        cases=(
            Case(_step(), _inputs()),
            Case(_step(4), _inputs(4)),
            Case(_step(1, scale=0.3), _inputs(1)),
            Case(_step(masked=False, rotated=False), _inputs()),
            Case(_step(), _inputs(rows=2), 0, "more than one new token"),
            Case(_step(4), _inputs(4, angles=4)),  # the rotations are not fused
        ),
    ),
)
