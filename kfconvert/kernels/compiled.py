"""The compiled kernels of one device as a family: the functions of kfconvert.ops, never on plain ATen."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from .. import extension, ops
from ..ops.reduce import kernel_order, kernel_pair, reduced_dims

# Not here: second names, and what has no kernel of its own: attention, blocks, contract, optimizers,
# sliding_window, sliding_window_mean_std.
NAMES = (
    "act_mul",
    "add_layer_norm",
    "add_mul_exp",
    "add_relu",
    "add_rms_norm",
    "add_sigmoid",
    "batch_norm_act",
    "batch_norm_relu",
    "bias_act",
    "bias_dropout_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "conv_act",
    "cross_entropy",
    "dequantize_int8",
    "embedding_layer_norm",
    "geglu",
    "gelu_dropout",
    "group_norm_act",
    "group_norm_silu",
    "layer_norm_act",
    "layer_norm_gelu",
    "layer_norm_relu",
    "layer_norm_silu",
    "linear_act",
    "mish_scale",
    "mse_loss",
    "mul_tanh",
    "multiply_relu",
    "normalize_image",
    "prelu_bias",
    "quantize_int8",
    "reduce_mean_abs",
    "reduce_sum_squared",
    "rms_norm",
    "rms_norm_act",
    "rms_norm_gelu",
    "rope",
    "scale_shift_act",
    "softmax",
    "swish_multiply",
)


def family(device_type: str) -> dict[str, Callable]:
    """The functions by name, for ``"cpu"`` or ``"cuda"``."""
    return {name: _only(device_type, name, getattr(ops, name)) for name in NAMES}


def _only(device_type, name, operator):
    full_name = f"kfconvert.kernels.{device_type}.{name}"
    parameters = tuple(inspect.signature(operator).parameters)
    why_aten = _WHY_ATEN.get(name, lambda *args, **kwargs: None)

    @functools.wraps(operator)
    def kernel(*args, **kwargs):
        if not (extension.CUDA_KERNELS_LOADED if device_type == "cuda" else extension.EXTENSION_LOADED):
            reason = extension.load_errors.get(device_type)
            raise RuntimeError(f"{full_name}: no compiled kernels: {reason}")
        for parameter, value in (*zip(parameters, args), *kwargs.items()):
            if isinstance(value, Tensor) and value.device.type != device_type:
                raise RuntimeError(f"{full_name}: {parameter} is on {value.device}")
        reason = why_aten(*args, **kwargs)
        if reason is not None:
            raise RuntimeError(f"{full_name}: {reason}; kfconvert.ops.{name} runs it on plain ATen")
        return operator(*args, **kwargs)

    kernel.__module__ = f"kfconvert.kernels.{device_type}"
    kernel.__doc__ = f"The compiled kernel of :func:`kfconvert.ops.{name}` alone.\n\n{operator.__doc__}"
    return kernel


# The calls that kfconvert.ops hands to ATen although there is a kernel: the reason, or None for all others.
# Each function has the parameters of its operator.


def _of_a_gradient(*args, **kwargs):
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "the kernel has no backward"
    return None


def _of_batch_norm(
    x, weight, bias, running_mean, running_var, training=False, momentum=0.1, eps=1e-5
):
    return "the kernel takes the running statistics" if training else None


def _of_mish_scale(x, scale):
    halved = x.element_size() == 2 and not isinstance(scale, Tensor)
    return "of half types the kernel takes a tensor as scale" if halved else None


def _of_embedding(*args, **kwargs):
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "the kernel takes no autocast"
    return _of_a_gradient(*args, **kwargs)


def _of_rope(x, cos, sin, interleaved=False):
    return _of_a_gradient(cos, sin)


def _of_dequantize(q, scale, *args, **kwargs):
    learned = torch.is_grad_enabled() and isinstance(scale, Tensor) and scale.requires_grad
    return "the kernel has no backward" if learned else None


def _of_gelu_dropout(x, p=0.5, training=True):
    return "the kernel takes p below 1" if training and p == 1 else None


def _of_bias_dropout_add(x, bias, residual, p=0.5, training=True, dim=-1):
    return _of_gelu_dropout(x, p, training)


def _of_softmax(x, dim=-1, scale=1.0, mask=None):
    return "the kernel takes the last dimension" if x.dim() == 0 or dim not in (-1, x.dim() - 1) else None


def _of_mse_loss(x, y, reduction="mean"):
    if reduction == "none" or kernel_pair(x, y) is None:
        return "the kernel takes a mean or a sum over tensors of one shape that lie in memory alike"
    return None


def _of_reduction(operator):
    def why_aten(x, dim=None, keepdim=False):
        if kernel_order(x, reduced_dims(operator, x, dim)) is None:
            return "the kernel takes dimensions that lie innermost in memory"
        return None

    return why_aten


_WHY_ATEN = {
    "batch_norm_relu": _of_batch_norm,
    "bias_dropout_add": _of_bias_dropout_add,
    "dequantize_int8": _of_dequantize,
    "embedding_layer_norm": _of_embedding,
    "gelu_dropout": _of_gelu_dropout,
    "mish_scale": _of_mish_scale,
    "mse_loss": _of_mse_loss,
    "reduce_mean_abs": _of_reduction("reduce_mean_abs"),
    "reduce_sum_squared": _of_reduction("reduce_sum_squared"),
    "rope": _of_rope,
    "scale_shift_act": _of_a_gradient,
    "softmax": _of_softmax,
}
