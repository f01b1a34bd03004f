"""The lesson of algorithms: attention that never stores its scores is faster than any fusion that stores them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Lesson


def native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes ``softmax(Q K^T / sqrt(d)) V``. Arguments and result: (batch, heads, length, d)."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / float(query.shape[-1]) ** 0.5
    return torch.matmul(torch.softmax(scores, -1), value)


def operators(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes :func:`native` by PyTorch's operator."""
    return F.scaled_dot_product_attention(query, key, value)


def by_triton() -> Callable[..., Tensor]:
    from .triton_attention import attention

    return attention


def of_family(family: Any) -> Callable[..., Tensor]:
    """Returns :func:`native` with library products, and scale and softmax as one kernel of ``kfconvert.kernels``."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.matmul(query, key.transpose(-2, -1))
        return torch.matmul(family.softmax(scores, scale=query.shape[-1] ** -0.5), value)

    return attention


def inputs(normal: Callable[..., Tensor], **sizes: int) -> tuple[Tensor, ...]:
    return tuple(normal(*sizes.values()) for _ in range(3))


LESSON = Lesson(
    name="attention",
    formula="softmax(Q K^T / sqrt(d)) V",
    learned="a fused softmax saves passes over length x length scores, a kernel that keeps them on chip writes none",
    sizes={
        "small": {"batch": 2, "heads": 4, "length": 128, "width": 64},
        "full": {"batch": 4, "heads": 12, "length": 1024, "width": 64},
    },
    inputs=inputs,
    native=native,
    operators=operators,
    triton=by_triton,
    kernel=of_family,
)
