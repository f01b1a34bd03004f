"""act(x + bias) and prelu(x + bias, weight) with a bias and a weight for each channel: one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.fused.bias_act import check_terms
from ...ops.standalone.prelu_bias import check_prelu
from ..named import over
from .activations import activate
from .arguments import laid_out_as, require_forward
from .launch import by_channel, channel_of, launch, tile


def prelu_bias(x: Tensor, weight: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    if weight.numel() == 1 and weight.dim() <= 1:
        weight = weight.expand(bias.shape)
    check_prelu(x, bias, weight, dim)
    require_forward("prelu_bias", x, bias, weight)
    return _launched(x, bias, weight.contiguous(), dim, "none")


@triton.jit
def _kernel(
    x, bias, weight, y, channels, rows, cols,
    R: tl.constexpr, C: tl.constexpr, BY_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col, inside = tile(rows, cols, R, C)
    at = row * cols + col
    channel = channel_of(row, col, channels, BY_ROW)
    exists = channel < channels
    v = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + channel, exists).to(tl.float32)
    if weight is not None:
        v = tl.where(v > 0, v, v * tl.load(weight + channel, exists).to(tl.float32))
    tl.store(y + at, activate(v, ACTIVATION, 0.0), inside)


def _bias_act(x, bias, activation, dim):
    check_terms("bias_act", x, bias, None, dim)
    require_forward("bias_act", x, bias)
    return _launched(x, bias, None, dim, activation)


def _launched(x, bias, weight, dim, activation):
    y = torch.empty_like(x)
    channels = bias.numel()
    matrix = by_channel(y, dim, channels)
    x = laid_out_as(y, x)
    launch(_kernel, y, x, bias.contiguous(), weight, y, channels, ACTIVATION=activation, **matrix)
    return y


_NAMED = over({"bias_act": _bias_act}, "bias_gelu", "bias_relu", "bias_silu")
globals().update(_NAMED)

__all__ = ["prelu_bias", *_NAMED]
