"""The lesson of matrix products: a library computes the product, and an epilogue fuses the following operations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Lesson


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes ``gelu(x W^T + b)``. x: (..., in); weight: (out, in); bias: (out,)."""
    y = F.linear(x, weight, bias)
    return 0.5 * y * (1.0 + torch.erf(y * 0.7071067811865476))


def operators(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes :func:`native` with PyTorch's GELU."""
    return F.gelu(F.linear(x, weight, bias))


def by_triton() -> Callable[..., Tensor]:
    from .triton_linear_gelu import linear_gelu

    return linear_gelu


def of_family(family: Any) -> Callable[..., Tensor]:
    """Returns :func:`native` with a library product and the kernel of a family of ``kfconvert.kernels``."""
    return lambda x, weight, bias: family.linear_act(x, weight, bias, "gelu")


def inputs(normal: Callable[..., Tensor], rows: int, features: int, results: int) -> tuple[Tensor, ...]:
    return normal(rows, features), normal(results, features) / features**0.5, normal(results)


LESSON = Lesson(
    name="linear_gelu",
    formula="gelu(x W^T + b)",
    learned="the product stays with a library, which is hard to beat; the epilogue needs no pass through memory",
    sizes={
        "small": {"rows": 128, "features": 256, "results": 1024},
        "full": {"rows": 4096, "features": 768, "results": 3072},
    },
    inputs=inputs,
    native=native,
    operators=operators,
    triton=by_triton,
    kernel=of_family,
)
