"""Linear layers with a weight of int8 or float8 numbers and a scale for each row, as torchao and gpt-fast compute them:
alone, several with the same input as one product, and the first half of gated MLPs.

A bias is not part of a match.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import Either, Op, Tree, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedGatedQuantizedLinear, FusedMergedQuantizedLinear, FusedQuantizedLinear
from .activations import family
from .cases import Make, net, random
from .checks import FLOATING, same_shape, traced, weights_refusal
from .merged import refusal_of_views
from .skeletons import Bindings, Live, bound, live

_ACTIVATIONS = "silu gelu gelu_tanh relu"


def _int8(prefix: str) -> Tree:
    """The product is scaled."""
    numbers = Op(aten.to.dtype, Var(f"{prefix}numbers"), Var(f"{prefix}dtype"))
    product = Op(aten.linear.default, Var("x"), numbers, None, name=f"{prefix}product")
    plain = Var(f"{prefix}factors")
    factors = Either(Op(aten.to.dtype, plain, Var(f"{prefix}factors_dtype")), plain)
    scale = Either(Op(aten.flatten.using_ints, factors, name=f"{prefix}flat"), factors)
    return Op(aten.mul.Tensor, product, scale, name=f"{prefix}result")


def _float8(prefix: str) -> Tree:
    """The weight is scaled in the dtype of the scale."""
    numbers = Op(aten.to.dtype, Op(aten.t.default, Var(f"{prefix}numbers")), Var(f"{prefix}dtype"))
    scaled = Op(aten.mul.Tensor, numbers, Op(aten.t.default, Var(f"{prefix}factors")))
    weight = Either(Op(aten.to.dtype, scaled, Var(f"{prefix}weight_dtype")), scaled)
    products = aten.matmul.default, aten.mm.default
    return Either(*(Op(product, Var("x"), weight, name=f"{prefix}result") for product in products))


@dataclass(frozen=True)
class _Kind:
    """A way to compute such a layer. ``tree`` has the captures "x", and with the prefix that it receives, "numbers",
    "factors" and "result"."""

    name: str
    tree: Callable[[str], Tree]
    scales_weight: bool

    def refusal(self, c: dict[str, Any], prefix: str = "") -> str | None:
        nodes = {name: c[prefix + name] for name in ("numbers", "factors")}
        refused = weights_refusal(weight=nodes["numbers"], scale=nodes["factors"])
        if refused is not None:
            return refused
        numbers, factors, x = traced(nodes["numbers"]), traced(nodes["factors"]), traced(c["x"])
        if numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
            return f"the weight has dtype {numbers.dtype}, not int8 or float8_e4m3fn"
        if numbers.dim() != 2 or factors.shape not in ((numbers.shape[0],), (numbers.shape[0], 1)):
            return f"the weight has a scale of shape {tuple(factors.shape)}, not one for each row"
        if not self.scales_weight and factors.dim() == 2 and f"{prefix}flat" not in c:
            return "the scale multiplies rows of the product, not its columns"
        if x.dtype not in FLOATING or factors.dtype not in FLOATING:
            return f"dtype {x.dtype} has no fused kernel"
        casts = {c[prefix + name] for name in ("dtype", "factors_dtype") if prefix + name in c}
        allowed = {x.dtype, factors.dtype} if self.scales_weight else {x.dtype}
        if casts - allowed or traced(c[f"{prefix}result"]).dtype != x.dtype:
            return "the weight is cast to another dtype than that of x"
        return None

    def built(self, c: dict[str, Any], tensor: Live, prefix: str = "") -> tuple[FusedQuantizedLinear, Bindings]:
        nodes = {"weight": c[f"{prefix}numbers"], "scale": c[f"{prefix}factors"]}
        linear = FusedQuantizedLinear.from_tensors(**live(tensor, nodes), scales_weight=self.scales_weight)
        return linear, bound(linear, nodes)

    def refusal_alone(self, match: Match) -> str | None:
        return self.refusal(match.captures)

    def build_alone(self, match: Match, tensor: Live) -> Replacement:
        linear, bindings = self.built(match.captures, tensor)
        return Replacement(linear, (match.captures["x"],), tuple(bindings), (match.root,))

    def refusal_merged(self, match: Match) -> str | None:
        result = match.captures["result"]
        if traced(match.captures["numbers"]).shape[0] % 2:
            return "its odd number of features would misalign the results of others"
        return refusal_of_views(result) or self.refusal(match.captures)

    def build_merged(self, match: Match, tensor: Live) -> Replacement:
        made = [self.built(member.captures, tensor) for member in match.members]
        bindings = tuple(binding for _, found in made for binding in found)
        module = FusedMergedQuantizedLinear(*(linear for linear, _ in made))
        results = tuple(member.root for member in match.members)
        return Replacement(module, (match.captures["x"],), bindings, results)

    def refusal_gated(self, match: Match) -> str | None:
        c = match.captures
        if not same_shape(c["gate_result"], c["up_result"]):
            return "gate and up differ in size: one of them is broadcast"
        return self.refusal(c, "gate_") or self.refusal(c, "up_")

    def build_gated(self, match: Match, tensor: Live, activation: str) -> Replacement:
        gate, up = (self.built(match.captures, tensor, prefix) for prefix in ("gate_", "up_"))
        module = FusedGatedQuantizedLinear(gate[0], up[0], activation)
        return Replacement(module, (match.captures["x"],), (*gate[1], *up[1]), (match.root,))


def _parts(forward: Callable[..., Any], dtype: torch.dtype = torch.int8, *shape: int, act: Make = nn.Identity) -> Make:
    """Layers with numbers and scales by their names "a", "b" and "c"; ``forward`` gets them after x."""

    def numbers() -> nn.Parameter:
        return nn.Parameter(torch.randint(-100, 100, (24, 16)).to(dtype), False)

    def scale() -> nn.Parameter:
        return nn.Parameter(torch.rand(shape or (24, 1)) / 100)

    parts = {f"{name}_{part}": make for name in "abc" for part, make in (("numbers", numbers), ("scale", scale))}

    def called(self: Any, x: Tensor) -> Any:
        layers = [(getattr(self, f"{name}_numbers"), getattr(self, f"{name}_scale")) for name in "abc"]
        return forward(self.act, x, *layers)

    return net(called, act=act, **parts)


def _torchao_int8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    y = torch.mm(x.reshape(-1, 16), numbers.t().to(x.dtype)) * scale.to(x.dtype).flatten()
    return y.reshape(*x.shape[:-1], 24)


def _torchao_float8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return torch.matmul(x, (numbers.t().to(torch.float32) * scale.t()).to(x.dtype))


def _gpt_fast(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.linear(x, numbers.to(x.dtype)) * scale.to(x.dtype)


def _rounded_scale(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    return nn.functional.linear(x, numbers.to(x.dtype)) * scale.to(torch.bfloat16).flatten()


_X, _HALF = random((2, 3, 16)), random((2, 3, 16), dtype=torch.bfloat16)
_FLOAT8 = torch.float8_e4m3fn
_Layer = Callable[..., Tensor]


def _alone(layer: _Layer, dtype: torch.dtype = torch.int8, *shape: int) -> Make:
    return _parts(lambda act, x, a, b, c: layer(x, *a), dtype, *shape)


def _three(layer: _Layer, dtype: torch.dtype) -> Make:
    return _parts(lambda act, x, a, b, c: layer(x, *a).abs() + layer(x, *b).abs() - layer(x, *c).abs(), dtype)


def _gated(layer: _Layer, dtype: torch.dtype, act: Make) -> Make:
    return _parts(lambda act, x, a, b, c: act(layer(x, *a)) * layer(x, *b), dtype, act=act)


def _patterns(
    kind: _Kind, layer: _Layer, dtype: torch.dtype, given: Callable[[], Any], cases: tuple[Case, ...]
) -> tuple[Pattern, ...]:
    returned = _parts(lambda act, x, a, b, c: (layer(x, *a), layer(x, *b).abs()), dtype)
    return (
        Pattern(
            name=kind.name,
            tree=kind.tree(""),
            anchor="result",
            refusal=kind.refusal_alone,
            build=kind.build_alone,
            cases=cases,
        ),
        Pattern(
            name=f"merged_{kind.name}",
            tree=kind.tree(""),
            anchor="result",
            refusal=kind.refusal_merged,
            build=kind.build_merged,
            siblings="x",
            cases=(Case(_three(layer, dtype), given), Case(returned, given, 0, "returned by the model")),
        ),
        *family(
            f"gated_{kind.name}",
            lambda act: Op(aten.mul.Tensor, act(kind.tree("gate_")), kind.tree("up_")),
            _ACTIVATIONS,
            kind.build_gated,
            lambda act: (Case(_gated(layer, dtype, act), given),),
            anchor="gate_result",
            refusal=kind.refusal_gated,
        ),
    )


INT8, FLOAT8 = _Kind("quantized_linear", _int8, False), _Kind("float8_linear", _float8, True)
PATTERNS = (
    *_patterns(
        INT8,
        _torchao_int8,
        torch.int8,
        _X,
        (
            Case(_alone(_torchao_int8), _HALF),
            Case(_alone(_gpt_fast, torch.int8, 24), _HALF),
            Case(_alone(_gpt_fast), random((24, 16), dtype=torch.bfloat16), 0, "multiplies rows of the product"),
            Case(_alone(_torchao_int8, torch.int8, 1), _HALF, 0, "not one for each row"),
            Case(_alone(_rounded_scale), _X, 0, "cast to another dtype"),
            Case(_alone(_torchao_int8, torch.int16), _HALF, 0, "dtype torch.int16"),
        ),
    ),
    *_patterns(
        FLOAT8,
        _torchao_float8,
        _FLOAT8,
        _X,
        (
            Case(_alone(_torchao_float8, _FLOAT8), _X),
            Case(_alone(_torchao_float8, _FLOAT8, 1, 1), _X, 0, "not one for each row"),
        ),
    ),
)
