"""reduce_sum_squared, reduce_mean_abs and mse_loss: sums of terms in one pass over memory.

Float64, float32, float16 or bfloat16; half types are squared and summed in float32, and only the result is rounded.
The order of additions only depends on shapes and device, so equal inputs give equal results.

Backward: 2 x grad; sign(x) grad / n; 2 (x - y) grad / n and its negative, also in one pass over memory.
"""

from collections.abc import Sequence
from enum import IntEnum
from math import prod
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from ..declaration import declare
from ..double_backward import is_differentiated
from ..norms import accumulator
from ..registration import (
    autocast,
    cast_to_widest,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    require_broadcast,
    require_float,
    require_same_options,
    require_shape,
    wants_gradient,
)

__all__ = ["mse_loss", "reduce_mean_abs", "reduce_sum_squared"]


class Term(IntEnum):
    """The kind of term, with the numbers of csrc/common/arguments.h."""

    SQUARE = 1
    MAGNITUDE = 2
    SQUARED_DIFFERENCE = 3


def _pairs_unlike(x, y, reduction="mean"):
    if reduction == "none" or not _takes_pair(x, y):
        return "the kernel takes a mean or a sum over contiguous tensors with equal shapes"
    return None


def _reduces_outer(operator):
    def why_aten(x, dim=None, keepdim=False):
        if not _takes_rows(x, reduced_dims(operator, x, dim)):
            return "the kernel takes the last dimensions of contiguous tensors"
        return None

    return why_aten


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), -1),
    why_aten=_reduces_outer("reduce_sum_squared"),
)
def reduce_sum_squared(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Computes ``(x * x).sum(dim, keepdim)`` in one pass over memory.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16.
        dim: dimensions to sum; None for all. The kernel takes the last dimensions of contiguous tensors. Others run in
            ATen, in two passes and with rounded terms of half types.
        keepdim: whether the result has these dimensions, with size 1.

    Returns:
        In x's dtype; 0 for no elements.

    Raises:
        RuntimeError: an unsupported dtype or invalid dimensions.
    """
    dims = reduced_dims("reduce_sum_squared", x, dim)
    if not _takes_rows(x, dims):
        return (x * x).sum(dims, keepdim)
    return _reduce(x, dims, keepdim, Term.SQUARE, mean=False)


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), -1),
    why_aten=_reduces_outer("reduce_mean_abs"),
)
def reduce_mean_abs(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Computes ``x.abs().mean(dim, keepdim)`` in one pass over memory.

    See :func:`reduce_sum_squared`. The mean of no elements is NaN.
    """
    dims = reduced_dims("reduce_mean_abs", x, dim)
    if not _takes_rows(x, dims):
        return x.abs().mean(dims, keepdim)
    return _reduce(x, dims, keepdim, Term.MAGNITUDE, mean=True)


@declare(
    group="reduction", example=lambda t, rows, columns: (t(rows, columns), t(rows, columns)), why_aten=_pairs_unlike
)
def mse_loss(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Computes ``F.mse_loss(x, y, reduction=reduction)`` in one pass over memory.

    Tensors with broadcast shapes or not contiguous, and ``reduction="none"``, run in ATen.

    Args:
        x, y: any shape and strides; one device and dtype (autocast aligns dtypes), see
            :func:`reduce_sum_squared`.
        reduction: "mean" (NaN for no elements), "sum" or "none".

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
        ValueError: another reduction.
    """
    operator = "mse_loss"
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"kfconvert::{operator}: reduction must be mean, sum or none, got {reduction!r}")
    require_float(operator, x)
    require_same_options(operator, "y", x, y)
    require_broadcast(operator, x, y)
    if reduction == "none" or not _takes_pair(x, y):
        x, y = torch.broadcast_tensors(x, y)
        return F.mse_loss(x, y, reduction=reduction)
    return _call(x, y, x.dim(), Term.SQUARED_DIFFERENCE, reduction == "mean")


def reduced_dims(operator, x, dim):
    """Returns the dimensions of ``dim``, in ascending order."""
    require_float(operator, x)
    if dim is None:
        dims = ()
    else:  # numbers of NumPy and tensors of one integer too
        try:
            dims = tuple(map(index, dim)) if isinstance(dim, Sequence) else (index(dim),)
        except TypeError:
            raise TypeError(f"kfconvert::{operator}: dim must be integers, got {dim!r}") from None
    if not dims:  # as in ATen
        return tuple(range(x.dim()))
    most = max(x.dim(), 1)
    for d in dims:
        require(-most <= d < most, operator, f"dim {d} is out of range for x of shape {tuple(x.shape)}")
    found = sorted({d % most for d in dims})
    require(len(found) == len(dims), operator, f"dim {dims} names a dimension twice")
    return tuple(found) if x.dim() else ()


def _takes_rows(x, dims):
    return has_kernels(x) and x.is_contiguous() and dims == tuple(range(x.dim() - len(dims), x.dim()))


def _takes_pair(x, y):
    return x.shape == y.shape and has_kernels(x) and x.is_contiguous() and y.is_contiguous()


def _reduce(x, dims, keepdim, term, mean):
    y = _call(x, None, len(dims), term, mean)
    return y.reshape([1 if d in dims else size for d, size in enumerate(x.shape)]) if keepdim else y


def _call(x, other, dims, term, mean):
    operator = _DIFFERENTIABLE if wants_gradient(x, other) else _INFERENCE
    return operator(x, other, dims, term, mean, False)


def _result_dtype(x, wide):
    return accumulator(x.dtype) if wide else x.dtype


def _check(x, other, dims, term):
    operator = "reduce_rows"
    require_float(operator, x)
    fits = 0 <= dims <= x.dim()
    require(fits, operator, f"cannot reduce {dims} dimensions of x of shape {tuple(x.shape)}")
    fits = (other is not None) == (term == Term.SQUARED_DIFFERENCE)
    require(fits, operator, "other belongs to differences only")
    if other is not None:
        require_same_options(operator, "other", x, other)
        require_shape(operator, "other", other, x.shape)


def _compose(x, other, dims, term, mean, wide):
    _check(x, other, dims, term)
    kept, reduced = x.shape[: x.dim() - dims], x.shape[x.dim() - dims :]
    if term == Term.MAGNITUDE:
        terms = x.abs()
    else:
        terms = (x if other is None else x - other).square()
    terms = terms.reshape(*kept, prod(reduced))
    dtype = _result_dtype(x, wide)
    return (terms.mean(-1, dtype=dtype) if mean else terms.sum(-1, dtype=dtype)).contiguous()


def _fake(x, other, dims, term, mean, wide):
    _check(x, other, dims, term)
    return x.new_empty(x.shape[: x.dim() - dims], dtype=_result_dtype(x, wide))


def _compose_backward(grad, x, other, dims, term, mean, both):
    """Returns differentiable gradients of x and, with ``both``, of other, else an empty tensor."""
    dtype, wide = x.dtype, accumulator(x.dtype)
    grad = grad.to(wide).reshape((*grad.shape, *[1] * dims))
    if mean:
        grad = grad / prod(x.shape[x.dim() - dims :])
    if term == Term.MAGNITUDE:
        of_x = x.sgn() * grad
    else:
        x = x.to(wide)
        of_x = (x if other is None else x - other.to(wide)) * (2 * grad)
    of_x = of_x.to(dtype).contiguous()
    return of_x, -of_x if both else of_x.new_empty(0)


def _save(ctx, inputs, output):
    x, other, *ctx.options, _ = inputs
    ctx.save_for_backward(x, other)


def _differentiate(ctx, grad):
    x, other = ctx.saved_tensors
    backward = _compose_backward if is_differentiated() else _BACKWARD
    x_needs, other_needs = ctx.needs_input_grad[:2]
    of_x = of_other = None
    if x_needs:
        of_x, of_other = backward(grad, x, other, *ctx.options, other_needs)
    else:  # squared differences are symmetric
        of_other, _ = backward(grad, other, x, *ctx.options, False)
    return of_x, of_other if other_needs else None, None, None, None, None


def _autocast(args, device_type):
    """Applies ATen's rules: a squared error is float32, on CUDA a sum too. The kernels read half types."""
    x, other, dims, term, mean, wide = args
    if other is not None:
        x, other = cast_to_widest((x, other), device_type)
    wide = wide or term == Term.SQUARED_DIFFERENCE or (term == Term.SQUARE and device_type == "cuda")
    return x, other, dims, term, mean, wide


_OPERATOR, _INFERENCE = define_with_twin(
    "reduce_rows(Tensor x, Tensor? other, int dims, int term, bool mean, bool wide) -> Tensor", _compose, _fake
)
_BACKWARD = define(
    "reduce_rows_backward(Tensor grad, Tensor x, Tensor? other, int dims, int term, bool mean, bool both) "
    "-> (Tensor, Tensor)",
    _compose_backward,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), _autocast)
