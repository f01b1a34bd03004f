"""Layer norm and root mean square norm of x + residual, then an activation: one kernel for full rows."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.activations import BY_CODE, CODES
from ...ops.norms import as_shape, check_norm, row_count
from ...ops.registration import require
from ..named import over
from .activations import activate
from .arguments import require_forward
from .launch import WIDEST, launch, tile


def layer_norm_act(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, activation="none", residual=None, return_sum=False,
    negative_slope=0.01,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    affine = weight, bias, eps, 0.0
    return _norm(True, x, normalized_shape, residual, return_sum, affine, activation, negative_slope)


def rms_norm_act(
    x, normalized_shape, weight=None, eps=1e-6, activation="none", residual=None, return_sum=False, offset=0.0,
    negative_slope=0.01,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    affine = weight, None, eps, offset
    return _norm(False, x, normalized_shape, residual, return_sum, affine, activation, negative_slope)


@triton.jit
def _kernel(
    x, residual, weight, bias, y, s, count, eps, offset, negative_slope, rows, cols,
    R: tl.constexpr, C: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    v = tl.load(x + at, inside, 0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + row % count * cols + col, inside, 0.0).to(tl.float32)
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
    require(cols <= WIDEST, operator, f"Triton takes rows of at most {WIDEST} elements, not {cols}")
    x = x.contiguous()
    y, s, count = torch.empty_like(x), None, 1
    if residual is not None:
        s, count = torch.empty_like(x) if return_sum else None, row_count(residual, shape)
    weight, bias, residual = (None if given is None else given.contiguous() for given in (weight, bias, residual))
    arguments = (x, residual, weight, bias, y, s, count, eps, offset, negative_slope)
    rows = row_count(x, shape)
    launch(_kernel, y, *arguments, rows=rows, cols=cols, widest=WIDEST, CENTER=center, ACTIVATION=activation)
    if not return_sum:
        return y
    return y, x if residual is None else s


_LAYER_NORMS = ("add_layer_norm", "layer_norm_gelu", "layer_norm_relu", "layer_norm_silu")
_NAMED = {
    **over({"layer_norm_act": layer_norm_act}, *_LAYER_NORMS),
    **over({"rms_norm_act": rms_norm_act}, "add_rms_norm", "rms_norm", "rms_norm_gelu"),
}
globals().update(_NAMED)

__all__ = ["layer_norm_act", "rms_norm_act", *_NAMED]
