"""``nn.MultiheadAttention`` of one tensor, without masks and returned weights, and without copies between products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import AnyNumber, Either, Op, Tree, Var, aten, fixed_size
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedSelfAttention
from .cases import Make, linear, net, random
from .checks import dtype_refusal, linear_refusal, sizes, traced
from .skeletons import fused_linear


def _swapped(tree: Tree) -> Either:
    """``tree`` with its first two dimensions swapped."""
    return Either(Op(aten.transpose.int, tree, 1, 0), Op(aten.transpose.int, tree, 0, 1))


def _attention(x: Tree) -> Op:
    packed = Op(aten.linear.default, x, Var("in_weight"), Var("in_bias"), name="in_proj")
    packed = Op(aten.unflatten.int, packed, -1, [3, AnyNumber("features")])
    packed = Op(aten.transpose.int, Op(aten.unsqueeze.default, packed, 0), 0, -2)
    packed = Op(aten.contiguous.default, Op(aten.squeeze.dim, packed, -2), name="packed")

    def heads(index: int, name: str) -> Op:
        part = Op(aten.select.int, packed, 0, index)
        rows = Op(aten.reshape.default, part, Var(f"{name}_rows_shape"), name=f"{name}_rows")
        return Op(aten.reshape.default, Op(aten.transpose.int, rows, 0, 1), Var(f"{name}_shape"), name=name)

    attended = Op(
        aten.scaled_dot_product_attention.default, heads(0, "q"), heads(1, "k"), heads(2, "v"), name="attended"
    )
    joined = Op(
        aten.reshape.default, Op(aten.permute.default, attended, [2, 0, 1, 3]), Var("joined_shape"), name="joined"
    )
    out = Op(aten.linear.default, joined, Var("out_weight"), Var("out_bias"), name="out_proj")
    return Op(aten.reshape.default, out, Var("result_shape"), name="result")


_TREE = Either(
    Op(aten.transpose.int, _attention(_swapped(Var("x"))), 1, 0, name="batch_first"),
    Op(aten.transpose.int, _attention(_swapped(Var("x"))), 0, 1, name="batch_first"),
    _attention(Var("x")),
)


def _refusal(match: Match) -> str | None:
    captures = match.captures
    x, joined = captures["x"], captures["joined"]
    refusal = linear_refusal(x, captures["in_weight"], captures["in_bias"])
    refusal = refusal or linear_refusal(joined, captures["out_weight"], captures["out_bias"])
    if refusal or dtype_refusal(x, joined):
        return refusal or dtype_refusal(x, joined)
    if len(sizes(x)) != 3:
        return "its input has no batch dimension"
    batch, length, _ = sizes(x)
    if "batch_first" not in captures:
        batch, length = length, batch
    heads, width = (fixed_size(traced(captures["q"]).shape[dimension]) for dimension in (1, 3))
    if heads is None or width is None or captures["features"] != heads * width:
        return "it has no fixed number of heads"
    for name in ("q", "k", "v"):
        rows = captures[f"{name}_rows"]
        # With this number of rows the heads are in batch order, which determines the middle size.
        if traced(rows).dim() != 3 or (sizes(rows)[0], sizes(rows)[2]) != (length, str(width)):
            return "its heads are arranged in another way"
        if sizes(captures[name]) != [batch, str(heads), length, str(width)]:
            return "its heads are arranged in another way"
    if traced(joined).dim() != 2 or sizes(joined)[1] != str(heads * width):
        return "the results of its heads are arranged in another way"
    return None if sizes(match.root)[:2] == sizes(x)[:2] else "the sizes of its result differ from its input"


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures = match.captures
    in_proj, in_bindings = fused_linear(captures, tensor, "in_")
    out_proj, out_bindings = fused_linear(captures, tensor, "out_")
    module = FusedSelfAttention(in_proj, out_proj, int(traced(captures["q"]).shape[1]), "batch_first" in captures)
    return Replacement(module, (captures["x"],), (*in_bindings, *out_bindings), (match.root,))


def _of_torch(
    change: Callable[[Tensor], Tensor] = lambda x: x, weights: bool = False, mask: bool = False, **options
) -> Make:
    """An nn.MultiheadAttention with ``change(x)`` as keys."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[1], x.shape[1]) if mask else None
        return self.attention(x, change(x), x, need_weights=weights, attn_mask=hidden)[0]

    return net(forward, attention=lambda: nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}))


def _arranged(*rows: int) -> Make:
    """An nn.MultiheadAttention that splits rows into heads differently."""

    def forward(self: Any, x: Tensor) -> Tensor:
        packed = self.first(x.transpose(1, 0)).unflatten(-1, (3, 16)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        parts = packed.contiguous()
        heads = [parts[i].reshape(rows).transpose(0, 1).reshape(3, 4, 5, 4) for i in range(3)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).reshape(15, 16)
        return self.second(mixed).reshape(5, 3, 16).transpose(1, 0)

    return net(forward, first=linear(16, 48), second=linear())


_TEXTS = random((3, 5, 16))
PATTERNS = (
    Pattern(
        name="self_attention",
        tree=_TREE,
        anchor="in_proj",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_of_torch(), _TEXTS),
            Case(_of_torch(batch_first=False), _TEXTS),
            Case(_of_torch(bias=False), _TEXTS),
            Case(_of_torch(weights=True), _TEXTS, 0),
            Case(_of_torch(mask=True), _TEXTS, 0),
            Case(_arranged(5, 12, 4), _TEXTS),
            Case(_arranged(15, 4, 4), _TEXTS, 0, "arranged in another way"),
            Case(_arranged(5, 4, 12), _TEXTS, 0, "arranged in another way"),
            Case(_of_torch(torch.sin), _TEXTS, 0),
        ),
    ),
)
