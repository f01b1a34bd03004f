"""``nn.MultiheadAttention`` of one tensor, without masks and returned weights, and without copies between products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import AnyNumber, Either, Op, Tree, Var, aten, fixed_size
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedLinear, FusedSelfAttention
from .checks import dtype_refusal, linear_refusal, sizes, traced


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
    linears: list[FusedLinear] = []
    bindings: list[tuple[nn.Module, str, fx.Node]] = []
    for name in ("in", "out"):
        found = {key: captures[f"{name}_{key}"] for key in ("weight", "bias") if captures[f"{name}_{key}"] is not None}
        live = {key: tensor(node) for key, node in found.items()}
        linears.append(FusedLinear.from_tensors(live["weight"], live.get("bias")))
        bindings += [(linears[-1], key, node) for key, node in found.items()]
    heads = int(traced(captures["q"]).shape[1])
    module = FusedSelfAttention(linears[0], linears[1], heads, "batch_first" in captures)
    return Replacement(module, (captures["x"],), tuple(bindings), (match.root,))


class _Attention(nn.Module):
    def __init__(self, batch_first: bool = True, bias: bool = True, weights: bool = False, masked: bool = False):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first)
        self.weights, self.masked = weights, masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]) if self.masked else None
        return self.attention(x, x, x, need_weights=self.weights, attn_mask=mask)[0]


class _Arranged(nn.Module):
    """An nn.MultiheadAttention that splits rows into heads differently."""

    def __init__(self, rows: tuple[int, int, int]):
        super().__init__()
        self.first, self.second, self.rows = nn.Linear(16, 48), nn.Linear(16, 16), rows

    def forward(self, x: Tensor) -> Tensor:
        packed = self.first(x.transpose(1, 0)).unflatten(-1, (3, 16)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        parts = packed.contiguous()
        heads = [parts[i].reshape(self.rows).transpose(0, 1).reshape(3, 4, 5, 4) for i in range(3)]
        mixed = nn.functional.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).reshape(15, 16)
        return self.second(mixed).reshape(5, 3, 16).transpose(1, 0)


class _Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x.sin(), x, need_weights=False)[0]


def _texts() -> tuple[Tensor, ...]:
    return (torch.randn(3, 5, 16),)


PATTERNS = (
    Pattern(
        name="self_attention",
        tree=_TREE,
        anchor="in_proj",
        numerics="reassociated",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_Attention, _texts),
            Case(lambda: _Attention(batch_first=False), _texts),
            Case(lambda: _Attention(bias=False), _texts),
            Case(lambda: _Attention(weights=True), _texts, 0),
            Case(lambda: _Attention(masked=True), _texts, 0),
            Case(lambda: _Arranged((5, 12, 4)), _texts),
            Case(lambda: _Arranged((15, 4, 4)), _texts, 0, "arranged in another way"),
            Case(lambda: _Arranged((5, 4, 12)), _texts, 0, "arranged in another way"),
            Case(_Crossed, _texts, 0),
        ),
    ),
)
