"""act(x + bias) and prelu(x + bias, weight) with a bias and a weight for each channel: one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.fused.bias_act import check_terms
from ...ops.standalone.prelu_bias import check_prelu
from .activations import activate
from .arguments import laid_out_as, require_forward
from .launch import by_channel, channel_of, launch, tile


def bias_relu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return _bias_act(x, bias, dim, "relu")


def bias_gelu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return _bias_act(x, bias, dim, "gelu")


def bias_silu(x: Tensor, bias: Tensor, dim: int = -1) -> Tensor:
    return _bias_act(x, bias, dim, "silu")


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


def _bias_act(x, bias, dim, activation):
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
