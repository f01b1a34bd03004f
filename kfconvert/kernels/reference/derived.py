"""Definitions that are the plain ATen branches of the functions of kfconvert.ops, and others with few lines."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.bias_act import spread
from ...ops.fused.combine_act import combine_act
from ..named import over, rebound

_PLAIN = {"has_kernels": lambda x: False}
_COMBINED = {"combine_act": rebound(combine_act, _PLAIN)}
_GENERAL = {
    **over(_PLAIN, "batch_norm_act", "bias_act", "conv_act", "group_norm_act", "layer_norm_act", "linear_act"),
    **over(_PLAIN, "normalize_image", "prelu_bias", "quantize_int8", "dequantize_int8", "rms_norm_act", "rope"),
    **over(_PLAIN, "scale_shift_act", "softmax"),
    **over(_COMBINED, "act_mul", "add_mul_exp", "add_relu", "add_sigmoid", "mish_scale", "mul_tanh", "multiply_relu"),
}
_NAMED = {
    **over(_GENERAL, "bias_gelu", "bias_relu", "bias_silu", "geglu", "swish_multiply"),
    **over(_GENERAL, "add_layer_norm", "layer_norm_gelu", "layer_norm_relu", "layer_norm_silu"),
    **over(_GENERAL, "add_rms_norm", "rms_norm", "rms_norm_gelu", "group_norm_silu"),
}
globals().update(_GENERAL, **_NAMED)


def batch_norm_relu(x, weight, bias, running_mean, running_var, training=False, momentum=0.1, eps=1e-5) -> Tensor:
    return F.relu(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps))


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True, dim: int = -1
) -> Tensor:
    return F.dropout(x if bias is None else x + spread(bias, x, dim), p, training) + residual


def cross_entropy(
    x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(x, target, None, None, ignore_index, None, reduction, label_smoothing)


def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(F.gelu(x), p, training)


def reduce_sum_squared(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    return (x * x).sum(dim, keepdim)


def reduce_mean_abs(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    return x.abs().mean(dim, keepdim)


def mse_loss(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(*torch.broadcast_tensors(x, y), reduction=reduction)


def sliding_window(x: Tensor, size: int, stride: int, reduce: str = "mean") -> Tensor:
    windows = x.unfold(-1, size, stride)
    if reduce == "std":
        return windows.std(-1, correction=0)
    return {"mean": windows.mean, "sum": windows.sum, "max": windows.amax, "min": windows.amin}[reduce](-1)


def sliding_window_mean_std(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(x.unfold(-1, window, 1), -1, correction=0)
    return mean, std


def contract(equation: str, *tensors: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    y = torch.einsum(equation, *tensors)
    return y if shape is None else y.reshape(shape)


def fused_adam(params, lr=1e-3, **options) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr, foreach=False, fused=False, **options)


def fused_adamw(params, lr=1e-3, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr, foreach=False, fused=False, **options)


def fused_sgd(params, lr=1e-3, **options) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr, foreach=False, fused=False, **options)
