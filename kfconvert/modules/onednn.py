"""oneDNN and MKL on CPU: the packed-weight calls of this PyTorch, and their names of activations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Pointwise = tuple[str, list[float], str]
Finish = Callable[[torch.Tensor], torch.Tensor]

# name -> (attribute, scalars, algorithm) of mkldnn::_linear_pointwise and mkldnn::_convolution_pointwise
# Activations in which oneDNN drops NaN are not listed: relu and relu6 are maxima and return 0, and sigmoid returns 0 on
# CPUs without AVX2.
_POINTWISE = {
    "none": ("none", (), ""),
    "gelu": ("gelu", (), "none"),
    "gelu_tanh": ("gelu", (), "tanh"),
    "silu": ("swish", (), ""),
    "tanh": ("tanh", (), ""),
    "hardswish": ("hardswish", (), ""),
}


_IN_PLACE: dict[str, Finish] = {
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda y: torch.ops.aten.gelu_(y, approximate="tanh"),
    "silu": lambda y: F.silu(y, inplace=True),
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "relu6": lambda y: F.hardtanh_(y, 0.0, 6.0),
    "hardswish": lambda y: F.hardswish(y, inplace=True),
    "quick_gelu": lambda y: y.mul_(torch.sigmoid(1.702 * y)),
    "hardsigmoid": lambda y: F.hardsigmoid(y, inplace=True),
}


def pointwise(activation: str, negative_slope: float) -> tuple[Pointwise, Finish | None]:
    """Returns how to compute an activation with the same NaN and infinities as ATen.

    The result is oneDNN's (attribute, scalars, algorithm), and a function to call on the result, or None.
    """
    if activation == "leaky_relu" and negative_slope != 0:  # a slope of 0 is oneDNN's relu
        return ("leaky_relu", [negative_slope], ""), None
    if activation in _POINTWISE:
        attribute, scalars, algorithm = _POINTWISE[activation]
        return (attribute, list(scalars), algorithm), None
    return ("none", [], ""), in_place(activation, negative_slope)


def in_place(activation: str, negative_slope: float) -> Finish | None:
    """Returns ATen's in-place activation, whose argument is still in the cache after a convolution, or None."""
    if activation == "leaky_relu":
        return lambda y: F.leaky_relu_(y, negative_slope)
    return _IN_PLACE.get(activation)


def _has(namespace, *names: str) -> bool:
    return all(hasattr(namespace, name) for name in names)


HAS_ONEDNN = torch.backends.mkldnn.is_available() and _has(
    torch.ops.mkldnn,
    "_reorder_linear_weight",
    "_linear_pointwise",
    "_reorder_convolution_weight",
    "_convolution_pointwise",
)
HAS_MKL = torch.backends.mkl.is_available() and _has(torch.ops.mkl, "_mkl_reorder_linear_weight", "_mkl_linear")


def runs_onednn(x: torch.Tensor) -> bool:
    """Whether the packed oneDNN calls accept ``x``: a non-empty float32 CPU tensor, with oneDNN enabled.

    Half types are excluded, because oneDNN emulates them without native instructions, and ATen calls oneDNN for them
    anyway.
    """
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    return fits and HAS_ONEDNN and bool(torch.backends.mkldnn.enabled)
