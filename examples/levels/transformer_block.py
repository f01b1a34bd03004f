"""The lesson of whole blocks: the gains of the other lessons in context."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kfconvert import kernels

from . import attention, layer_norm, linear_gelu
from .definition import Lesson


def block_of(
    norm: Callable[..., Tensor],
    add_norm: Callable[..., tuple[Tensor, Tensor]],
    attend: Callable[..., Tensor],
    activated: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """Returns a pre-norm transformer block of these parts, whose arguments are as in their lessons.
    ``add_norm(x, y, weight, bias)`` returns the norm of ``x + y``, and the sum."""

    def block(
        x: Tensor,
        heads: int,
        norm1_weight: Tensor,
        norm1_bias: Tensor,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        norm2_weight: Tensor,
        norm2_bias: Tensor,
        up_weight: Tensor,
        up_bias: Tensor,
        down_weight: Tensor,
        down_bias: Tensor,
    ) -> Tensor:
        batch, length, width = x.shape
        qkv = F.linear(norm(x, norm1_weight, norm1_bias), qkv_weight, qkv_bias)
        query, key, value = qkv.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attend(query, key, value).transpose(1, 2).reshape(batch, length, width)
        y, total = add_norm(F.linear(mixed, out_weight, out_bias), x, norm2_weight, norm2_bias)
        return total + F.linear(activated(y, up_weight, up_bias), down_weight, down_bias)

    return block


def native_add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return layer_norm.native(total, weight, bias), total


def operators_add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return layer_norm.operators(total, weight, bias), total


def inputs(normal: Callable[..., Tensor], batch: int, length: int, width: int, heads: int) -> tuple[Any, ...]:
    def linear(features: int, given: int) -> tuple[Tensor, Tensor]:
        return normal(features, given) / given**0.5, normal(features) / 10

    def norm() -> tuple[Tensor, Tensor]:
        return 1 + normal(width) / 10, normal(width) / 10

    x = normal(batch, length, width)
    attended = *norm(), *linear(3 * width, width), *linear(width, width)
    return (x, heads, *attended, *norm(), *linear(4 * width, width), *linear(width, 4 * width))


def _with_add_norm_of(family: Any, **parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return family.add_layer_norm(x, y, x.shape[-1], weight, bias)

    return block_of(layer_norm.of_family(family), add_norm, **parts)


def by_triton() -> Callable[..., Tensor]:
    parts = {"attend": attention.by_triton(), "activated": linear_gelu.by_triton()}
    return _with_add_norm_of(kernels.triton, **parts)


def of_family(family: Any) -> Callable[..., Tensor]:
    parts = {"attend": attention.of_family(family), "activated": linear_gelu.of_family(family)}
    return _with_add_norm_of(family, **parts)


native = block_of(layer_norm.native, native_add_norm, attention.native, linear_gelu.native)

LESSON = Lesson(
    name="transformer_block",
    formula="x + attention(norm(x)), then x + linear(gelu(linear(norm(x))))",
    learned="the products stay with libraries; a block saves around them what the other lessons save",
    sizes={
        "small": {"batch": 2, "length": 64, "width": 256, "heads": 4},
        "full": {"batch": 8, "length": 512, "width": 768, "heads": 12},
    },
    inputs=inputs,
    native=native,
    operators=block_of(layer_norm.operators, operators_add_norm, attention.operators, linear_gelu.operators),
    triton=by_triton,
    kernel=of_family,
)
