"""Linear layers with a weight of int8 or float8 numbers and a scale for each row, as torchao and gpt-fast compute them.

The bias is added after a reshape, which is not part of the match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedQuantizedLinear
from .cases import Make, net, random
from .checks import FLOATING, traced, weights_refusal
from .skeletons import bound, live

_NUMBERS = Var("numbers")
_CAST = Op(aten.to.dtype, Op(aten.t.default, _NUMBERS), Var("dtype"))
# int8: the product is scaled.
_FACTORS = Either(Op(aten.to.dtype, Var("factors"), Var("factors_dtype")), Var("factors"))
_PRODUCT = Either(
    Op(aten.mm.default, Var("x"), _CAST, name="product"),
    Op(aten.linear.default, Var("x"), Op(aten.to.dtype, _NUMBERS, Var("dtype")), None, name="product"),
)
_SCALED_PRODUCT = Op(aten.mul.Tensor, _PRODUCT, Either(Op(aten.flatten.using_ints, _FACTORS), _FACTORS))
# float8: the weight is scaled in the dtype of the scale.
_SCALED = Op(aten.mul.Tensor, _CAST, Op(aten.t.default, Var("factors")))
_WEIGHT = Either(Op(aten.to.dtype, _SCALED, Var("weight_dtype")), _SCALED)
_SCALED_WEIGHT = Either(
    *(Op(product, Var("x"), _WEIGHT, name="product") for product in (aten.matmul.default, aten.mm.default))
)


def _refusal(match: Match) -> str | None:
    c = match.captures
    refused = weights_refusal(weight=c["numbers"], scale=c["factors"])
    if refused is not None:
        return refused
    numbers, factors, x = traced(c["numbers"]), traced(c["factors"]), traced(c["x"])
    if numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
        return f"the weight has dtype {numbers.dtype}, not int8 or float8_e4m3fn"
    if numbers.dim() != 2 or factors.shape not in ((numbers.shape[0],), (numbers.shape[0], 1)):
        return f"the weight has a scale of shape {tuple(factors.shape)}, not one for each row"
    if x.dtype not in FLOATING or factors.dtype not in FLOATING:
        return f"dtype {x.dtype} has no fused kernel"
    casts = {c[name] for name in ("dtype", "factors_dtype") if name in c} if match.pattern.name == INT8 else set()
    if casts - {x.dtype} or traced(match.root).dtype != x.dtype:
        return "the weight is cast to another dtype than that of x"
    return None


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    c = match.captures
    nodes = {"weight": c["numbers"], "scale": c["factors"]}
    module = FusedQuantizedLinear.from_tensors(**live(tensor, nodes), scales_weight=match.pattern.name != INT8)
    return Replacement(module, (c["x"],), tuple(bound(module, nodes)), (match.root,))


def _of(forward: Callable[..., Tensor], dtype: torch.dtype = torch.int8, *shape: int) -> Make:
    def numbers() -> nn.Parameter:
        return nn.Parameter(torch.randint(-100, 100, (24, 16)).to(dtype), False)

    return net(forward, numbers=numbers, scale=lambda: nn.Parameter(torch.rand(shape or (24, 1)) / 100))


def _torchao_int8(self: Any, x: Tensor) -> Tensor:
    y = torch.mm(x.reshape(-1, 16), self.numbers.t().to(x.dtype)) * self.scale.to(x.dtype).flatten()
    return y.reshape(*x.shape[:-1], 24)


def _torchao_float8(self: Any, x: Tensor) -> Tensor:
    weight = (self.numbers.t().to(torch.float32) * self.scale.t()).to(x.dtype)
    return torch.matmul(x, weight)


def _gpt_fast(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, self.numbers.to(x.dtype)) * self.scale.to(x.dtype)


INT8, FLOAT8 = "quantized_linear", "float8_linear"
_X, _HALF = random((2, 3, 16)), random((2, 3, 16), dtype=torch.bfloat16)
_FLOAT8 = torch.float8_e4m3fn
PATTERNS = (
    Pattern(
        name=INT8,
        tree=_SCALED_PRODUCT,
        anchor="product",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_of(_torchao_int8), _HALF),
            Case(_of(_gpt_fast, torch.int8, 24), _HALF),
            Case(_of(_torchao_int8, torch.int8, 1), _HALF, 0, "not one for each row"),
            Case(_of(_torchao_int8, torch.int16), _HALF, 0, "dtype torch.int16"),
        ),
    ),
    Pattern(
        name=FLOAT8,
        tree=_SCALED_WEIGHT,
        anchor="product",
        refusal=_refusal,
        build=_build,
        cases=(
            Case(_of(_torchao_float8, _FLOAT8), _X),
            Case(_of(_torchao_float8, _FLOAT8, 1, 1), _X, 0, "not one for each row"),
        ),
    ),
)
