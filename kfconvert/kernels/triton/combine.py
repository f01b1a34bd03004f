"""The functions of two tensors: act(x + y), act(x * y) or act(x) * y, one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.activations import BY_CODE, CODES
from ...ops.fused.combine_act import Combination, check_pair, empty_result
from ..named import over
from .activations import activate
from .arguments import require_forward
from .launch import launch, tile


def act_mul(gate: Tensor, up: Tensor, activation: str, negative_slope: float = 0.01) -> Tensor:
    return _combined(gate, up, Combination.GATED, CODES[activation], negative_slope)


@triton.jit
def _kernel(
    x, other, y, negative_slope, rows, cols,
    R: tl.constexpr, C: tl.constexpr, COMBINATION: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    a = tl.load(x + at, inside).to(tl.float32)
    b = tl.load(other + at, inside).to(tl.float32)
    if COMBINATION == "SUM":
        v = activate(a + b, ACTIVATION, negative_slope)
    elif COMBINATION == "PRODUCT":
        v = activate(a * b, ACTIVATION, negative_slope)
    else:
        v = activate(a, ACTIVATION, negative_slope) * b
    tl.store(y + at, v, inside)


def _combined(x, other, combination, code, negative_slope=0.01):
    operator = "combine_act"
    check_pair(operator, x, other)
    require_forward(operator, x, other)
    y = empty_result(x, other)
    x, other = _laid_out_as(y, x), _laid_out_as(y, other)
    names = {"COMBINATION": combination.name, "ACTIVATION": BY_CODE[code].name}
    launch(_kernel, y, x, other, y, negative_slope, rows=1, cols=y.numel(), **names)
    return y


def _laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """Returns x, broadcast to the shape of the dense tensor y, with y's memory layout."""
    x = x.expand(y.shape)
    return x if x.stride() == y.stride() else torch.empty_like(y, dtype=x.dtype).copy_(x)


_PAIRS = ("add_mul_exp", "add_relu", "add_sigmoid", "mish_scale", "mul_tanh", "multiply_relu")
_NAMED = {**over({"combine_act": _combined}, *_PAIRS), **over({"act_mul": act_mul}, "geglu", "swish_multiply")}
globals().update(_NAMED)

__all__ = ["act_mul", *_NAMED]
