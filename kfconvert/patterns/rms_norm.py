"""RMS norm in its spellings, with the residual add before it: ``x / sqrt(mean(x^2) + eps) * (offset + weight)``.

Hugging Face models write it out, with casts between float32 and a half type in different places. torch.nn.RMSNorm
and timm call an operator. The fused module computes in float32 and rounds once at the end, which is at least as
accurate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Either, Number, Op, Tree, Var, aten, fixed_size
from ..matching import Case, Match, Pattern, Replacement
from ..modules import FusedAddRMSNorm, FusedRMSNorm
from .cases import Inputs, Make, net, parameter, random
from .checks import dtype_refusal, residual_refusal, traced, weights_refusal
from .skeletons import cast, norm_replacement

_HALF = (torch.float16, torch.bfloat16)


def _tree(value: Tree) -> Either:
    """The RMS norm of ``value``. The anchor is the call that computes 1 / sqrt(mean(x^2) + eps), or the root."""
    wide = cast(value, "wide")
    square = Either(
        Op(aten.pow.Tensor_Scalar, wide, Number(2)), Op(aten.mul.Tensor, wide, wide), Op(aten.square.default, wide)
    )
    total = Op(aten.add.Tensor, Op(aten.mean.dim, square, Var("dimensions"), True), Var("eps"))
    root = Either(
        Op(aten.sqrt.default, total, name="norm"), Op(aten.pow.Tensor_Scalar, total, Number(0.5), name="norm")
    )
    inverse = Op(aten.reciprocal.default, root)
    scale = Either(
        Op(aten.rsqrt.default, total, name="norm"),
        Op(aten.pow.Tensor_Scalar, total, Number(-0.5), name="norm"),
        inverse,
        Op(aten.mul.Tensor, inverse, Number(1)),  # the exported form of 1 / sqrt(...)
    )
    normalised = Either(
        Op(aten.mul.Tensor, wide, cast(scale, "scale_dtype")), Op(aten.div.Tensor, wide, cast(root, "scale_dtype"))
    )
    weight = cast(Var("weight"), "weight_dtype")
    weight = Either(Op(aten.add.Tensor, weight, Var("offset")), weight)
    call = Op(aten.rms_norm.default, wide, Var("normalized_shape"), weight, Var("eps"), name="norm")
    affine = Op(aten.mul.Tensor, cast(normalised, "normalised_dtype"), weight)
    return Either(*(cast(option, "result_dtype") for option in (affine, normalised, call)))


def _value(captures: dict[str, Any]) -> fx.Node:
    return captures.get("sum", captures["x"])


def _normalized_shape(captures: dict[str, Any]) -> tuple[Any, ...]:
    """The normalized sizes, with None for a free size."""
    if "normalized_shape" in captures:
        return tuple(map(fixed_size, captures["normalized_shape"]))
    return (fixed_size(traced(_value(captures)).shape[-1]),)


def _eps(captures: dict[str, Any]) -> float:
    """The eps of the call, or else ATen's default, the eps of the computation dtype."""
    if captures["eps"] is not None:
        return float(captures["eps"])
    dtype = traced(_value(captures)).dtype
    return torch.finfo(torch.float32 if dtype in _HALF else dtype).eps


def _refusal(match: Match) -> str | None:
    captures = match.captures
    value, weight = _value(captures), captures.get("weight")
    rank, shape = traced(value).dim(), _normalized_shape(captures)
    if "dimensions" in captures and list(captures["dimensions"]) not in ([-1], [rank - 1]):
        return f"the mean is over dimensions {list(captures['dimensions'])}, not over the last one"
    if None in shape:
        return "the size of the normalized dimension is free"
    for name in ("eps", "offset"):
        if isinstance(captures.get(name), fx.Node):
            return f"the {name} is a tensor, not a number"
    reason = None
    if "sum" in captures:
        reason = residual_refusal(captures["x"], captures["residual"], value, len(shape))
    reason = reason or weights_refusal(weight=weight) or dtype_refusal(value, captures["x"], captures.get("residual"))
    return reason or _weight_refusal(weight, value, shape) or _cast_refusal(match, value)


def _weight_refusal(weight: fx.Node | None, value: fx.Node, shape: tuple[int, ...]) -> str | None:
    if weight is None:
        return None
    own, dtype = traced(weight), traced(value).dtype
    if tuple(own.shape) != shape:
        return f"the weight has shape {tuple(own.shape)}, the normalized shape is {shape}"
    if own.dtype is not dtype and not (dtype in _HALF and own.dtype is torch.float32):
        return f"mixed dtypes {dtype}, {own.dtype}"
    return None


def _cast_refusal(match: Match, value: fx.Node) -> str | None:
    """The reason to reject a cast, or None. Half types may be cast to float32 and back, not wider."""
    dtype, result = traced(value).dtype, traced(match.root).dtype
    allowed = (dtype, torch.float32) if dtype in _HALF else (dtype,)
    for node in match.nodes:
        if node.target is aten.to.dtype and traced(node).dtype not in allowed:
            return f"a cast to {traced(node).dtype} in a norm of {dtype}"
    return None if result is dtype else f"the norm of {dtype} returns {result}"


def _build(match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
    captures = match.captures
    return norm_replacement(
        match,
        tensor,
        (FusedRMSNorm, FusedAddRMSNorm),
        {"weight": captures.get("weight")},
        normalized_shape=_normalized_shape(captures),
        eps=_eps(captures),
        offset=float(captures.get("offset", 0.0)),
    )


_Formula = Callable[[Tensor, Tensor], Tensor]


def _of(forward: Callable[..., Any], formula: _Formula, shape: tuple[int, ...] = (16,)) -> Make:
    return net(forward, weight=parameter(*shape), formula=lambda: formula)


def _norm(self: Any, x: Tensor) -> Tensor:
    return self.formula(x, self.weight)


def _add_norm(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return self.formula(x + residual, self.weight)


def _pre_norm(self: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A pre-norm block, whose sum is also the residual stream."""
    stream = x + residual
    return self.formula(stream, self.weight), stream


def _square_mean(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(_square_mean(wide) + 0.1)).to(x.dtype)


def _t5(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(_square_mean(x.to(torch.float32)) + 0.1)).to(weight.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(_square_mean(wide) + 0.1) * (1.0 + weight.float())).type_as(x)


def _call(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (16,), weight)


_FORMULAS: tuple[_Formula, ...] = (
    _llama,
    _t5,
    _gemma,
    _call,
    lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 0.2) * w,
    lambda x, w: x * (1 / torch.sqrt(torch.square(x).mean(-1, keepdim=True) + 0.2)),
    lambda x, w: w * (x * (_square_mean(x) + 0.1) ** -0.5),
    lambda x, w: nn.functional.rms_norm(x.float(), (16,), w.float(), 0.1).to(x.dtype),
)
_NEAR_MISSES: tuple[tuple[_Formula, str], ...] = (
    (lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 0.1) * w, "not over the last one"),
    (lambda x, w: x * torch.rsqrt(_square_mean(x) + w) * w, "the eps is a tensor"),
    (lambda x, w: x * (scale := torch.rsqrt(_square_mean(x) + 0.1)) * w + scale, "also used by"),
    (lambda x, w: x * torch.rsqrt(_square_mean(x.double()) + 0.1).float() * w, "a cast to torch.float64"),
)


_ONE, _TWO = random((2, 5, 16)), random((2, 5, 16), (2, 5, 16))
_ONE_BF16, _TWO_BF16 = (random(*[(2, 5, 16)] * count, dtype=torch.bfloat16) for count in (1, 2))


def _mixed() -> tuple[Tensor, ...]:
    return *_ONE_BF16(), *_ONE()


def _case(forward: Callable[..., Any], formula: _Formula, inputs: Inputs, *expected: Any, shape: Any = (16,)) -> Case:
    make = _of(forward, formula, shape)
    return Case(lambda: make().to(inputs()[0].dtype), inputs, *expected)


PATTERNS = (
    Pattern(
        name="rms_norm",
        tree=_tree(Var("x")),
        anchor="norm",
        refusal=_refusal,
        build=_build,
        cases=(
            *(_case(_norm, formula, inputs) for formula in _FORMULAS for inputs in (_ONE, _ONE_BF16)),
            _case(_norm, lambda x, w: nn.functional.rms_norm(x, (5, 16), w, 0.1), _ONE, shape=(5, 16)),
            *(_case(_norm, formula, _ONE, 0, reason) for formula, reason in _NEAR_MISSES),
            # The norm is fused without its weight if the weight cannot be fused.
            _case(_norm, lambda x, w: _llama(x, w * 2), _ONE, 1, "computed in the forward"),
            _case(_norm, _llama, _ONE, 1, "the weight has shape (5, 16)", shape=(5, 16)),
            _case(_norm, lambda x, w: _llama(x, w.float()), _ONE_BF16, 1, "returns torch.float32"),
            Case(_of(_norm, _t5), _ONE_BF16, 0, "returns torch.float32"),
        ),
    ),
    Pattern(
        name="add_rms_norm",
        tree=_tree(Op(aten.add.Tensor, Var("x"), Var("residual"), name="sum")),
        anchor="norm",
        refusal=_refusal,
        build=_build,
        kept=frozenset({"sum"}),
        cases=(
            *(_case(kind, formula, _TWO) for kind in (_add_norm, _pre_norm) for formula in (_llama, _gemma, _call)),
            *(_case(_pre_norm, formula, _TWO_BF16) for formula in (_llama, _t5, _gemma, _call)),
            _case(_add_norm, _llama, random((2, 5, 16), (1, 5, 16))),
            _case(_add_norm, _llama, random((5, 16), (2, 5, 16))),
            _case(_add_norm, _llama, random((2, 5, 16), (2, 5, 1)), 0, "broadcast"),
            Case(_of(_add_norm, _llama), _mixed, 0, "mixed dtypes torch.bfloat16, torch.float32"),
        ),
    ),
)
