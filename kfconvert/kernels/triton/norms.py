"""Layer norm and root mean square norm of x + residual, then an activation: one kernel for full rows."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.activations import BY_CODE, CODES
from ...ops.norms import as_shape, check_norm, row_count
from ...ops.standalone.norm_names import rms_eps, shape_weight_eps
from .activations import activate
from .arguments import repeated_rows, require_forward, require_width
from .launch import WIDEST, launch, tile


def layer_norm_act(
    x,
    normalized_shape,
    weight=None,
    bias=None,
    eps=1e-5,
    activation="none",
    residual=None,
    return_sum=False,
    negative_slope=0.01,
) -> Tensor | tuple[Tensor, Tensor]:
    affine = weight, bias, eps, 0.0
    return _norm(True, x, normalized_shape, residual, return_sum, affine, activation, negative_slope)


def layer_norm_relu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "relu")


def layer_norm_gelu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "gelu")


def layer_norm_silu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "silu")


def add_layer_norm(x, residual, normalized_shape, weight=None, bias=None, eps=1e-5) -> tuple[Tensor, Tensor]:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "none", residual, True)


def rms_norm_act(
    x,
    normalized_shape,
    weight=None,
    eps=1e-6,
    activation="none",
    residual=None,
    return_sum=False,
    offset=0.0,
    negative_slope=0.01,
) -> Tensor | tuple[Tensor, Tensor]:
    affine = weight, None, eps, offset
    return _norm(False, x, normalized_shape, residual, return_sum, affine, activation, negative_slope)


def rms_norm(x, normalized_shape, weight=None, eps=None) -> Tensor:
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps))


def rms_norm_gelu(x, normalized_shape=None, weight=None, eps=None) -> Tensor:
    normalized_shape, weight, eps = shape_weight_eps("rms_norm_gelu", normalized_shape, weight, eps)
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), "gelu")


def add_rms_norm(x, residual, normalized_shape, weight=None, eps=None) -> tuple[Tensor, Tensor]:
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), "none", residual, True)


@triton.jit
def _kernel(
    x, residual, weight, bias, y, s, inner, count, eps, offset, negative_slope, rows, cols,
    R: tl.constexpr, C: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + row // inner % count * cols + col, inside, 0.0).to(tl.float32)
        if s is not None:
            tl.store(s + at, v, inside)
    if CENTER:
        v = tl.where(inside, v - (tl.sum(v, 1) / cols)[:, None], 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 1) / cols + eps)[:, None]
    if weight is not None:
        v = v * (tl.load(weight + col, col < cols).to(tl.float32) + offset)
    if bias is not None:
        v = v + tl.load(bias + col, col < cols).to(tl.float32)
    tl.store(y + at, activate(v, ACTIVATION, negative_slope), inside)


def _norm(center, x, normalized_shape, residual, return_sum, affine, activation, negative_slope):
    operator = "layer_norm_act" if center else "rms_norm_act"
    shape, activation = as_shape(normalized_shape), BY_CODE[CODES[activation]].name
    weight, bias, eps, offset = affine
    check_norm(operator, x, residual, shape, weight, bias)
    require_forward(operator, x, weight, bias, residual)
    cols = math.prod(shape)
    require_width(operator, cols)
    x = x.contiguous()
    y, s, inner, count = torch.empty_like(x), None, 1, 1
    if residual is not None:
        s = torch.empty_like(x) if return_sum else None
        residual, inner, count = repeated_rows(residual, x, len(shape))
    weight, bias = (None if values is None else values.contiguous() for values in (weight, bias))
    arguments = (x, residual, weight, bias, y, s, inner, count, eps, offset, negative_slope)
    rows = row_count(x, shape)
    launch(_kernel, y, *arguments, rows=rows, cols=cols, widest=WIDEST, CENTER=center, ACTIVATION=activation)
    if not return_sum:
        return y
    return y, x if residual is None else s
