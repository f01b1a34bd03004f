"""Helpers of the norms: checks, shapes, gradients and the autocast rule."""

import math
from collections.abc import Sequence
from operator import index

import torch

from .registration import cast_floats, cast_to_widest, require, require_float, require_same_options, require_shape


def as_shape(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    """Returns the shape as a sequence; a number is the last dimension. Raises TypeError for other types."""
    if isinstance(normalized_shape, (tuple, list)):
        return normalized_shape
    if isinstance(normalized_shape, (int, torch.SymInt)):
        return (normalized_shape,)
    try:
        return (index(normalized_shape),)  # type: ignore[arg-type]  # whatever else it may be
    except TypeError:
        got = type(normalized_shape).__name__
        text = f"kfconvert: normalized_shape must be an integer or a tuple of integers, got {got}"
        raise TypeError(text) from None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a norm of ``dtype`` is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether images are stored as (N, spatial, C), and are not also contiguous."""
    # Inside of vmap, ``is_contiguous`` takes no memory format.
    return x.dim() in (4, 5) and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def row_count(x: torch.Tensor, shape) -> int:
    """Returns the number of rows of ``shape`` in x."""
    return math.prod(x.shape[: x.dim() - len(shape)])


def own_sum(results: tuple, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``results``, (y, x + residual), without aliases of arguments: without a residual, x is copied."""
    y, s = results
    return y, s.clone(memory_format=torch.contiguous_format) if residual is None else s


def check_norm(operator, x, residual, shape, weight, bias=None) -> None:
    """Raises RuntimeError if shapes, dtypes or devices are incompatible, as from the compiled kernels."""
    require_float(operator, x)
    require(
        1 <= len(shape) <= x.dim() and tuple(x.shape[-len(shape) :]) == tuple(shape),
        operator,
        f"normalized_shape does not fit the last dimensions of x of shape {tuple(x.shape)}",
    )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if x.element_size() > 2 or tensor.dtype != torch.float32:
            require_same_options(operator, name, x, tensor)
        require_shape(operator, name, tensor, shape)
    require(
        weight is None or bias is None or weight.dtype == bias.dtype, operator, "weight and bias have different dtypes"
    )
    if residual is not None:
        require_same_options(operator, "residual", x, residual)
        require(
            _repeats(tuple(residual.shape), tuple(x.shape), len(shape)),
            operator,
            f"residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)} or what repeats over its "
            "leading dimensions",
        )


def _repeats(small, large, least):
    """Whether ``small`` has sizes of 1, then at least ``least`` of the trailing sizes of ``large``."""
    if not least <= len(small) <= len(large):
        return False
    large = large[len(large) - len(small) :]
    while small[0] == 1 and len(small) > least:
        small, large = small[1:], large[1:]
    return small == large


def grad_of_residual(grad_s: torch.Tensor | None, shape) -> torch.Tensor | None:
    """Returns the gradient of the sum, reduced to the residual's ``shape``, which is None without a residual."""
    if shape is None or grad_s is None:
        return None
    return grad_s if grad_s.shape == shape else grad_s.sum_to_size(shape)


def autocast_norm(args, device_type):
    """Applies ATen's rule: float32 on CUDA. On the CPU the norm keeps the dtype of the sum, which is the widest.

    args: x, residual, normalized_shape and then, in any order, weight, bias and numbers.
    """
    if device_type == "cuda":
        return cast_floats(args, torch.float32, device_type)
    x, residual, *rest = args
    if residual is not None:
        x, residual = cast_to_widest((x, residual), device_type)
    if x.dtype == torch.float32:
        rest = cast_floats(rest, torch.float32, device_type)
    return x, residual, *rest
