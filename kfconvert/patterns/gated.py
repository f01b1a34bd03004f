"""The first half of gated MLPs: ``act(x Wg^T + bg) * (x Wu^T + bu)``, by two layers or by one packed layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.functional import glu

from ..graph import Either, Op, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedGatedLinear
from .activations import family
from .cases import TOKENS, Make, linear, net, random
from .checks import linear_refusal, same_shape, traced
from .skeletons import fused_linear


def _linear(name: str) -> Op:
    return Op(aten.linear.default, Var("x"), Var(f"{name}_weight"), Var(f"{name}_bias"), name=name)


_PACKED = _linear("packed")


def _half(name: str) -> Either:
    """A part of the packed layer, by its index ``<name>_index`` or its start ``<name>_start``."""
    index, dim = Var(f"{name}_index"), Var("dim")
    sizes = {aten.chunk.default: 2, aten.split.Tensor: Var("size"), aten.split_with_sizes.default: Var("sizes")}
    parts = [Op(split, _PACKED, size, dim, name="parts") for split, size in sizes.items()]
    return Either(
        *(Op(operator.getitem, each, index, name=name) for each in parts),
        Op(aten.slice.Tensor, _PACKED, dim, Var(f"{name}_start"), Var(f"{name}_end"), name=name),
    )


def _two_refusal(match: Match) -> str | None:
    c = match.captures
    if c["gate"] is c["up"]:
        return "gate and up are the same layer"
    if not same_shape(c["gate"], c["up"]):
        return "gate and up differ in size: one of them is broadcast"
    gate = linear_refusal(c["x"], c["gate_weight"], c["gate_bias"])
    return gate or linear_refusal(c["x"], c["up_weight"], c["up_bias"])


def _packed_refusal(match: Match) -> str | None:
    c = match.captures
    packed = traced(c["packed"])
    if c["dim"] % packed.dim() != packed.dim() - 1:
        return f"the packed layer is split along dimension {c['dim']}, not along its features"
    if "gate" in c:
        half = packed.shape[-1] // 2
        starts = {_start(match, name) for name in ("gate", "up")}
        if any(traced(c[name]).shape[-1] != half for name in ("gate", "up")) or starts != {0, half}:
            return "gate and up are not the two halves of the packed layer"
    return linear_refusal(c["x"], c["packed_weight"], c["packed_bias"])


def _start(match: Match, name: str) -> int:
    """The start of a part that has half the features of the packed layer."""
    c, size = match.captures, traced(match.captures["packed"]).shape[-1]
    return c[f"{name}_index"] * (size // 2) if f"{name}_index" in c else (c[f"{name}_start"] or 0) % size


def _build_two(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    gate, gate_bindings = fused_linear(match.captures, tensor, "gate_")
    up, up_bindings = fused_linear(match.captures, tensor, "up_")
    module = FusedGatedLinear(gate, up, activation)
    return Replacement(module, (match.captures["x"],), (*gate_bindings, *up_bindings), (match.root,))


def _build_packed(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    packed, bindings = fused_linear(match.captures, tensor, "packed_")
    gate_first = "gate" in match.captures and _start(match, "gate") == 0
    module = FusedGatedLinear.from_packed(packed, activation, gate_first)
    return Replacement(module, (match.captures["x"],), tuple(bindings), (match.root,))


def _two(forward: Callable[..., Tensor], act: Make = nn.SiLU, bias: bool = True, gates: int = 24) -> Make:
    return net(forward, gate=linear(16, gates, bias), up=linear(16, 24), act=act)


def _gated(self: Any, x: Tensor) -> Tensor:
    return self.act(self.gate(x)) * self.up(x)


def _packed(function: Callable[[Any, Tensor], Tensor], bias: bool = True, act: Make = nn.SiLU) -> Make:
    return net(lambda self, x: function(self.act, self.packed(x)), packed=linear(16, 48, bias), act=act)


def _parts(parts: Callable[[Tensor], Any], gate_first: bool = True, bias: bool = True, act: Make = nn.SiLU) -> Make:
    def gated(act: Any, h: Tensor) -> Tensor:
        first, second, *_ = parts(h)
        return act(first) * second if gate_first else first * act(second)

    return _packed(gated, bias, act)


def _kept_half(act: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return act(gate) * up + up


_TWO_LAYERS = (
    Case(_two(lambda self, x: self.up(x) * self.act(self.gate(x)), bias=False), TOKENS),
    Case(_two(_gated, gates=1), TOKENS, 0, "broadcast"),
    Case(_two(lambda self, x: self.act(self.gate(x)) * (y := self.up(x)) + y), TOKENS, 0, "also used by aten.add"),
    Case(_two(lambda self, x: (y := self.act(self.gate(x))) * self.up(x) + y), TOKENS, 0, "also used by aten.add"),
)
_ONE_LAYER = (
    Case(_parts(lambda h: h.split(24, dim=2), gate_first=False), TOKENS),
    Case(_parts(lambda h: h.split([24, 24], dim=-1), gate_first=False, bias=False), TOKENS),
    Case(_parts(lambda h: (h[..., :24], h[..., 24:])), TOKENS),
    Case(_parts(lambda h: (h[..., -24:], h[..., :24])), TOKENS),
    Case(_parts(lambda h: (h[..., ::2], h[..., 1::2])), TOKENS, 0),
    Case(_parts(lambda h: h.split([16, 16, 16], dim=-1)), TOKENS, 0, "not the two halves"),
    Case(_parts(lambda h: (h[..., :24], h[..., 12:36])), TOKENS, 0, "not the two halves"),
    Case(_parts(lambda h: h.chunk(2, dim=1)), random((2, 6, 16)), 0, "not along its features"),
    Case(_packed(_kept_half), TOKENS, 0, "also used by aten.add"),
)
_ACTIVATIONS = "none silu gelu gelu_tanh sigmoid relu quick_gelu"
PATTERNS = (
    *family(
        "gated_linear",
        lambda act: Op(aten.mul.Tensor, act(_linear("gate")), _linear("up")),
        _ACTIVATIONS,
        _build_two,
        lambda act: (Case(_two(_gated, act), TOKENS),),
        special={"silu": _TWO_LAYERS},
        anchor="gate",
        refusal=_two_refusal,
    ),
    *family(
        "packed_gated_linear",
        lambda act: Op(aten.mul.Tensor, act(_half("gate")), _half("up")),
        _ACTIVATIONS,
        _build_packed,
        lambda act: (Case(_parts(lambda h: h.chunk(2, dim=-1), act=act), TOKENS),),
        special={"silu": _ONE_LAYER},
        anchor="packed",
        refusal=_packed_refusal,
    ),
    Pattern(
        name="linear_glu",
        tree=Op(aten.glu.default, _PACKED, Var("dim")),
        anchor="packed",
        refusal=_packed_refusal,
        build=lambda match, tensor: _build_packed(match, tensor, "sigmoid"),
        cases=(
            Case(_packed(lambda act, h: glu(h)), TOKENS),
            Case(_packed(lambda act, h: glu(h, 2), bias=False), TOKENS),
            Case(_packed(lambda act, h: glu(h, 1)), random((2, 6, 16)), 0, "not along its features"),
        ),
    ),
)
