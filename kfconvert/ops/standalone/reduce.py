"""reduce_sum_squared, reduce_mean_abs and mse_loss: terms are added up as they are read, in one pass.

Float64, float32, float16 or bfloat16; the half types are squared and added up in float32, and only the result
is rounded. The order of the additions depends on shapes and device alone: equal inputs give equal results.

Backward: 2 x grad; sign(x) grad / n; 2 (x - y) grad / n and its negative: one pass over memory, too.
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
    require_float,
    require_same_options,
    wants_gradient,
)

__all__ = ["mse_loss", "reduce_mean_abs", "reduce_sum_squared"]


class Term(IntEnum):
    """The numbers are those of csrc/common/arguments.h."""

    SQUARE = 1
    MAGNITUDE = 2
    SQUARED_DIFFERENCE = 3


def _pairs_unlike(x, y, reduction="mean"):
    if reduction == "none" or kernel_pair(x, y) is None:
        return "the kernel takes a mean or a sum over tensors of one shape that lie in memory alike"
    return None


def _reduces_outer(operator):
    def why_aten(x, dim=None, keepdim=False):
        if kernel_order(x, reduced_dims(operator, x, dim)) is None:
            return "the kernel takes dimensions that lie innermost in memory"
        return None

    return why_aten


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), -1),
    why_aten=_reduces_outer("reduce_sum_squared"),
)
def reduce_sum_squared(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """``(x * x).sum(dim, keepdim)`` in one pass over memory.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16.
        dim: what is added up, all without it. The kernel takes dimensions that lie innermost in memory, as
            the last ones of a contiguous tensor or the channels of a channels_last image; others go to ATen,
            in two passes and with the terms of the half types rounded.
        keepdim: whether the result has these dimensions, with size 1.

    Returns:
        In x's dtype; of no elements 0.

    Raises:
        RuntimeError: a dtype or dimensions that do not fit.
    """
    dims = reduced_dims("reduce_sum_squared", x, dim)
    order = kernel_order(x, dims)
    if order is None:
        return (x * x).sum(dims, keepdim)
    return _reduce(x, order, dims, keepdim, Term.SQUARE, mean=False)


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), -1),
    why_aten=_reduces_outer("reduce_mean_abs"),
)
def reduce_mean_abs(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """``x.abs().mean(dim, keepdim)`` in one pass over memory.

    All is as in :func:`reduce_sum_squared`, but of no elements the mean is NaN.
    """
    dims = reduced_dims("reduce_mean_abs", x, dim)
    order = kernel_order(x, dims)
    if order is None:
        return x.abs().mean(dims, keepdim)
    return _reduce(x, order, dims, keepdim, Term.MAGNITUDE, mean=True)


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), t(rows, columns)),
    why_aten=_pairs_unlike,
)
def mse_loss(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """``F.mse_loss(x, y, reduction=reduction)`` in one pass over memory.

    Tensors of different shapes, which broadcast, or layouts, and ``reduction="none"``, go to ATen.

    Args:
        x, y: any shape and strides; one device and dtype (autocast aligns the dtypes), as of
            :func:`reduce_sum_squared`.
        reduction: "mean" (of no elements NaN), "sum" or "none".

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit.
        ValueError: another reduction.
    """
    operator = "mse_loss"
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"kfconvert::{operator}: reduction must be mean, sum or none, got {reduction!r}")
    require_float(operator, x)
    require_same_options(operator, "y", x, y)
    for one, two in zip(reversed(x.shape), reversed(y.shape)):
        message = f"shapes {tuple(x.shape)} and {tuple(y.shape)} do not broadcast"
        require(one == two or one == 1 or two == 1, operator, message)
    pair = None if reduction == "none" else kernel_pair(x, y)
    if pair is None:
        x, y = torch.broadcast_tensors(x, y)
        return F.mse_loss(x, y, reduction=reduction)
    x, y = pair
    return _call(x, y, x.dim(), Term.SQUARED_DIFFERENCE, reduction == "mean")


def reduced_dims(operator, x, dim):
    """The dimensions that ``dim`` stands for, in ascending order."""
    require_float(operator, x)
    if dim is None:
        dims = ()
    else:  # numbers of NumPy and tensors of one integer too
        try:
            dims = tuple(map(index, dim)) if isinstance(dim, Sequence) else (index(dim),)
        except TypeError:
            raise TypeError(f"kfconvert::{operator}: dim must be integers, got {dim!r}") from None
    if not dims:  # as ATen reads it
        return tuple(range(x.dim()))
    most = max(x.dim(), 1)
    for d in dims:
        require(-most <= d < most, operator, f"dim {d} is out of range for x of shape {tuple(x.shape)}")
    found = sorted({d % most for d in dims})
    require(len(found) == len(dims), operator, f"dim {dims} names a dimension twice")
    return tuple(found) if x.dim() else ()


def _memory_order(x, dims):
    """x's dimensions from the outermost in memory to the innermost; of size 1 those in ``dims`` are last."""

    def place(d):
        if x.shape[d] == 1:
            return (2, 0) if d in dims else (0, 0)
        return 1, -x.stride(d)

    places, order = [place(d) for d in range(x.dim())], []
    for d, own in enumerate(places):  # not by sorted, which torch.compile does not take for symbols
        after = next((i for i, other in enumerate(order) if own < places[other]), len(order))
        order.insert(after, d)
    return order


def kernel_order(x, dims):
    """x's dimensions as they lie in memory, where ``dims`` are the innermost; None: ATen's work."""
    if not has_kernels(x):
        return None
    first = x.dim() - len(dims)
    if x.is_contiguous() and dims == tuple(range(first, x.dim())):
        return list(range(x.dim()))
    order = _memory_order(x, dims)
    return order if set(order[first:]) == set(dims) else None


def kernel_pair(x, y):
    """x and y with their dimensions as both lie in memory, without gaps; None: ATen's work."""
    if x.shape != y.shape or not has_kernels(x):
        return None
    if not (x.is_contiguous() and y.is_contiguous()):
        order = _memory_order(x, range(x.dim()))
        x, y = x.permute(order), y.permute(order)
        if not (x.is_contiguous() and y.is_contiguous()):  # copies of both would cost more than ATen
            return None
    return x, y


def _reduce(x, order, dims, keepdim, term, mean):
    rows = x if order == list(range(x.dim())) else x.permute(order)
    y = _call(rows, None, len(dims), term, mean)
    kept = order[: x.dim() - len(dims)]
    if kept != sorted(kept):
        y = y.permute([kept.index(d) for d in sorted(kept)])
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
        message = f"other has shape {tuple(other.shape)}, expected {tuple(x.shape)}"
        require(x.shape == other.shape, operator, message)


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
    """The gradients of x and, with ``both``, of other, else an empty tensor; differentiable."""
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


def _fake_backward(grad, x, other, dims, term, mean, both):
    return x.new_empty(x.shape), x.new_empty(x.shape if both else 0)


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
    else:  # the squares of the differences are those of the other way round
        of_other, _ = backward(grad, other, x, *ctx.options, False)
    return of_x, of_other if other_needs else None, None, None, None, None


def _autocast(args, device_type):
    """ATen's rules: a squared error is float32, on CUDA a sum too. The kernels read half types themselves."""
    x, other, dims, term, mean, wide = args
    if other is not None:
        x, other = cast_to_widest((x, other), device_type)
    wide = wide or term == Term.SQUARED_DIFFERENCE or (term == Term.SQUARE and device_type == "cuda")
    return x, other, dims, term, mean, wide


_OPERATOR, _INFERENCE = define_with_twin(
    "reduce_rows(Tensor x, Tensor? other, int dims, int term, bool mean, bool wide) -> Tensor",
    _compose,
    _fake,
)
_BACKWARD = define(
    "reduce_rows_backward(Tensor grad, Tensor x, Tensor? other, int dims, int term, bool mean, bool both) "
    "-> (Tensor, Tensor)",
    _compose_backward,
    _fake_backward,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), _autocast)
