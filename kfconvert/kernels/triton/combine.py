"""The functions of two tensors: act(x + y), act(x * y) or act(x) * y, one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from ...ops.activations import BY_CODE, CODES, EXP_TWICE, MISH
from ...ops.fused.combine_act import Combination, check_pair, empty_result
from .activations import activate
from .arguments import laid_out_as, require_forward
from .launch import launch, tile


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y, Combination.SUM, CODES["relu"])


def multiply_relu(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y, Combination.PRODUCT, CODES["relu"])


def add_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y, Combination.SUM, CODES["sigmoid"])


def mul_tanh(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y, Combination.PRODUCT, CODES["tanh"])


def add_mul_exp(x: Tensor, y: Tensor) -> Tensor:
    return _combined(x, y, Combination.SUM, EXP_TWICE.code)


def act_mul(gate: Tensor, up: Tensor, activation: str, negative_slope: float = 0.01) -> Tensor:
    return _combined(gate, up, Combination.GATED, CODES[activation], negative_slope)


def swish_multiply(gate: Tensor, up: Tensor) -> Tensor:
    return act_mul(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return act_mul(gate, up, "gelu")


def mish_scale(x: Tensor, scale: Tensor) -> Tensor:
    return _combined(x, scale, Combination.GATED, MISH.code)


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
    x, other = laid_out_as(y, x), laid_out_as(y, other)
    names = {"COMBINATION": combination.name, "ACTIVATION": BY_CODE[code].name}
    launch(_kernel, y, x, other, y, negative_slope, rows=1, cols=y.numel(), **names)
    return y
