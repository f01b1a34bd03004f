"""The lesson of reductions: a kernel reads a row once, and a norm of elementary operations once per step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfconvert import kernels

from .definition import Lesson


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes layer norm over the last dimension. x: (..., width); weight, bias: (width,)."""
    centered = x - x.mean(-1, keepdim=True)
    variance = (centered * centered).mean(-1, keepdim=True)
    return centered * torch.rsqrt(variance + 1e-5) * weight + bias


def operators(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes :func:`native` by PyTorch's operator."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def of_family(family: Any) -> Callable[..., Tensor]:
    """Returns :func:`native` with the kernel of a family of ``kfconvert.kernels``."""
    return lambda x, weight, bias: family.layer_norm_act(x, x.shape[-1], weight, bias)


LESSON = Lesson(
    name="layer_norm",
    formula="(x - mean) / sqrt(variance + 1e-5) * weight + bias of each row",
    learned="seven passes over memory become one; PyTorch's operator already has one, a kernel can only match it",
    sizes={"small": {"rows": 512, "width": 768}, "full": {"rows": 16384, "width": 1024}},
    inputs=lambda normal, rows, width: (normal(rows, width), normal(width), normal(width)),
    native=native,
    operators=operators,
    triton=lambda: of_family(kernels.triton),
    kernel=of_family,
)
