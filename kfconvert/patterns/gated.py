"""The first half of gated MLPs: ``act(x Wg^T + bg) * (x Wu^T + bu)``, by two layers or by one packed layer."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Op, Tree, Var, aten
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedGatedLinear, FusedLinear
from .activations import with_activation
from .checks import linear_refusal, same_shape, traced

Build = Callable[[Match, Callable[[fx.Node], Tensor]], Replacement]

_ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "sigmoid", "relu", "quick_gelu")


def _linear(name: str) -> Op:
    return Op(aten.linear.default, Var("x"), Var(f"{name}_weight"), Var(f"{name}_bias"), name=name)


_PACKED = _linear("packed")


def _half(name: str) -> Either:
    """A part of the packed layer, by its index ``<name>_index`` or its start ``<name>_start``."""
    index, dim = Var(f"{name}_index"), Var("dim")
    return Either(
        Op(operator.getitem, Op(aten.chunk.default, _PACKED, 2, dim, name="parts"), index, name=name),
        Op(operator.getitem, Op(aten.split.Tensor, _PACKED, Var("size"), dim, name="parts"), index, name=name),
        Op(
            operator.getitem,
            Op(aten.split_with_sizes.default, _PACKED, Var("sizes"), dim, name="parts"),
            index,
            name=name,
        ),
        Op(aten.slice.Tensor, _PACKED, dim, Var(f"{name}_start"), Var(f"{name}_end"), name=name),
    )


def _gated(activation: str, gate: Tree, up: Tree) -> Op:
    return Op(aten.mul.Tensor, with_activation(activation, gate), up)


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


def _fused_linear(
    match: Match, name: str, tensor: Callable[[fx.Node], Tensor]
) -> tuple[FusedLinear, list[tuple[nn.Module, str, fx.Node]]]:
    weight, bias = match.captures[f"{name}_weight"], match.captures[f"{name}_bias"]
    linear = FusedLinear.from_tensors(tensor(weight), None if bias is None else tensor(bias))
    return linear, [(linear, "weight", weight)] + ([] if bias is None else [(linear, "bias", bias)])


def _build_two(activation: str) -> Build:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        gate, gate_bindings = _fused_linear(match, "gate", tensor)
        up, up_bindings = _fused_linear(match, "up", tensor)
        module = FusedGatedLinear(gate, up, activation)
        return Replacement(module, (match.captures["x"],), (*gate_bindings, *up_bindings), (match.root,))

    return build


def _build_packed(activation: str, gate_first: bool | None = None) -> Build:
    def build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        linear, bindings = _fused_linear(match, "packed", tensor)
        first = _start(match, "gate") == 0 if gate_first is None else gate_first
        module = FusedGatedLinear.from_packed(linear, activation, first)
        return Replacement(module, (match.captures["x"],), tuple(bindings), (match.root,))

    return build


_MODULES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class _Two(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], bias: bool = True, gates: int = 24):
        super().__init__()
        self.gate, self.up = nn.Linear(16, gates, bias=bias), nn.Linear(16, 24)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.gate(x), self.up(x))


class _Packed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], bias: bool = True):
        super().__init__()
        self.packed = nn.Linear(16, 48, bias=bias)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.packed(x))


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, 16),)


def _two_cases(activation: str) -> tuple[Case, ...]:
    act = _MODULES[activation]

    def kept_gate(gate: Tensor, up: Tensor) -> Tensor:
        activated = act(gate)
        return activated * up + activated

    return (
        Case(lambda: _Two(lambda gate, up: act(gate) * up), _tokens),
        Case(lambda: _Two(lambda gate, up: up * act(gate), bias=False), _tokens),
        Case(lambda: _Two(lambda gate, up: act(gate) * up, gates=1), _tokens, 0, "broadcast"),
        Case(lambda: _Two(lambda gate, up: act(gate) * up + up), _tokens, 0, "also used by aten.add"),
        Case(lambda: _Two(kept_gate), _tokens, 0, "also used by aten.add"),
    )


def _packed_cases(activation: str) -> tuple[Case, ...]:
    act = _MODULES[activation]

    def chunked(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return act(gate) * up

    def swapped(h: Tensor) -> Tensor:
        up, gate = h.split(24, dim=2)
        return up * act(gate)

    def split_by_sizes(h: Tensor) -> Tensor:
        up, gate = h.split([24, 24], dim=-1)
        return act(gate) * up

    def unequal(h: Tensor) -> Tensor:
        gate, up, _ = h.split([16, 16, 16], dim=-1)
        return act(gate) * up

    def along_tokens(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=1)
        return act(gate) * up

    def kept_half(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return act(gate) * up + up

    return (
        Case(lambda: _Packed(chunked), _tokens),
        Case(lambda: _Packed(swapped), _tokens),
        Case(lambda: _Packed(split_by_sizes, bias=False), _tokens),
        Case(lambda: _Packed(lambda h: act(h[..., :24]) * h[..., 24:]), _tokens),
        Case(lambda: _Packed(lambda h: act(h[..., -24:]) * h[..., :24]), _tokens),
        Case(lambda: _Packed(lambda h: act(h[..., ::2]) * h[..., 1::2]), _tokens, 0),
        Case(lambda: _Packed(unequal), _tokens, 0, "not the two halves"),
        Case(lambda: _Packed(lambda h: act(h[..., :24]) * h[..., 12:36]), _tokens, 0, "not the two halves"),
        Case(lambda: _Packed(along_tokens), lambda: (torch.randn(2, 6, 16),), 0, "not along its features"),
        Case(lambda: _Packed(kept_half), _tokens, 0, "also used by aten.add"),
    )


def _patterns(activation: str) -> tuple[Pattern, ...]:
    suffix = "" if activation == "none" else f"_{activation}"
    return (
        Pattern(
            name=f"gated_linear{suffix}",
            tree=_gated(activation, _linear("gate"), _linear("up")),
            anchor="gate",
            numerics="reassociated",
            refusal=_two_refusal,
            build=_build_two(activation),
            cases=_two_cases(activation),
        ),
        Pattern(
            name=f"packed_gated_linear{suffix}",
            tree=_gated(activation, _half("gate"), _half("up")),
            anchor="packed",
            numerics="reassociated",
            refusal=_packed_refusal,
            build=_build_packed(activation),
            cases=_packed_cases(activation),
        ),
    )


_GLU = Pattern(
    name="linear_glu",
    tree=Op(aten.glu.default, _PACKED, Var("dim")),
    anchor="packed",
    numerics="reassociated",
    refusal=_packed_refusal,
    build=_build_packed("sigmoid", gate_first=False),
    cases=(
        Case(lambda: _Packed(nn.functional.glu), _tokens),
        Case(lambda: _Packed(lambda h: nn.functional.glu(h, 2), bias=False), _tokens),
        Case(
            lambda: _Packed(lambda h: nn.functional.glu(h, 1)),
            lambda: (torch.randn(2, 6, 16),),
            0,
            "not along its features",
        ),
    ),
)

PATTERNS = (*(pattern for activation in _ACTIVATIONS for pattern in _patterns(activation)), _GLU)
