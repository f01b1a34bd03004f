"""oneDNN and MKL on CPU: which packed-weight calls this PyTorch has, and how they name activations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Pointwise = tuple[str, list[float], str]
Finish = Callable[[torch.Tensor], torch.Tensor]

# name -> (attribute, scalars, algorithm) of mkldnn::_linear_pointwise and mkldnn::_convolution_pointwise
# Missing are those in which oneDNN loses a NaN: relu and relu6 are maxima and give 0, sigmoid gives 0 on CPUs
# without AVX2.
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
    """How to compute one of the package's activations so that NaN and infinities come out as from ATen.

    Returns oneDNN's (attribute, scalars, algorithm), and what to call on the result afterwards, or None.
    """
    if activation == "leaky_relu" and negative_slope != 0:  # with 0 it is oneDNN's relu
        return ("leaky_relu", [negative_slope], ""), None
    if activation in _POINTWISE:
        attribute, scalars, algorithm = _POINTWISE[activation]
        return (attribute, list(scalars), algorithm), None
    return ("none", [], ""), in_place(activation, negative_slope)


def in_place(activation: str, negative_slope: float) -> Finish | None:
    """ATen's activation, written over its argument (still in the cache after a convolution), or None."""
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
    """Whether the packed oneDNN calls take ``x``: a float32 CPU tensor, not empty, oneDNN not switched off.

    The half types are left out: without native instructions oneDNN emulates them, and ATen calls it for them
    anyway.
    """
    return (
        HAS_ONEDNN  # type: ignore[return-value]  # torch leaves the descriptor of ``enabled`` untyped
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() > 0
        and torch.backends.mkldnn.enabled
    )
