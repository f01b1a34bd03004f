"""oneDNN and MKL on CPU: which packed-weight calls this PyTorch has, and how they name activations."""

import torch

# name -> (attribute, scalars, algorithm) of mkldnn::_linear_pointwise and mkldnn::_convolution_pointwise
_POINTWISE = {
    "none": ("none", (), ""),
    "relu": ("relu", (), ""),
    "gelu": ("gelu", (), "none"),
    "gelu_tanh": ("gelu", (), "tanh"),
    "silu": ("swish", (), ""),
    "tanh": ("tanh", (), ""),
    "sigmoid": ("sigmoid", (), ""),
    "relu6": ("hardtanh", (0.0, 6.0), ""),
    "hardswish": ("hardswish", (), ""),
}


def pointwise(activation: str, negative_slope: float) -> tuple[str, list[float], str]:
    """oneDNN's (attribute, scalars, algorithm) for one of the package's activations."""
    if activation == "leaky_relu":
        return "leaky_relu", [negative_slope], ""
    attribute, scalars, algorithm = _POINTWISE[activation]
    return attribute, list(scalars), algorithm


def _has(namespace, *names: str) -> bool:
    return all(hasattr(namespace, name) for name in names)


HAS_ONEDNN = torch.backends.mkldnn.is_available() and _has(
    torch.ops.mkldnn, "_reorder_linear_weight", "_linear_pointwise", "_reorder_convolution_weight",
    "_convolution_pointwise")
HAS_MKL = torch.backends.mkl.is_available() and _has(
    torch.ops.mkl, "_mkl_reorder_linear_weight", "_mkl_linear")


def runs_onednn(x: torch.Tensor) -> bool:
    """Whether the packed oneDNN calls take ``x``: a float32 CPU tensor, not empty, oneDNN not switched off.

    The half types are left out: without native instructions oneDNN emulates them, and ATen calls it for them
    anyway.
    """
    return (HAS_ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
            and torch.backends.mkldnn.enabled)
