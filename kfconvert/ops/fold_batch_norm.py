"""fold_batch_norm: a batch norm in eval mode as ``x * scale + shift`` by channel, in one small kernel.

scale = weight / sqrt(variance + eps), shift = bias + (before - mean) * scale (Ioffe and Szegedy, arXiv:1502.03167,
algorithm 2), computed in float64. For inference: no gradient goes through it.
"""

import torch
from torch import Tensor

from .norms import accumulator
from .registration import define, require, require_float, require_same_options
from .scale_shift_act import batch_norm_scale_and_shift


def fold_batch_norm(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    before: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(scale, shift) for :func:`kfconvert.ops.scale_shift_act`: two tensors (C,) of ``dtype``, on mean's device.

    Args:
        mean, variance, weight, bias: (C,), any float dtypes; the last two may be None: 1 and 0.
        before: (C,) or None, what is still to be added to the norm's input, as the bias of a convolution.
        eps: added to the variance.
        dtype: float32 or float64.

    Raises:
        RuntimeError: shapes or devices that do not fit.
    """
    given = [t for t in (mean, variance, weight, bias, before) if t is not None]
    if dtype != accumulator(mean.dtype) or any(t.dtype != mean.dtype for t in given):
        mean, variance, weight, bias, before = (
            None if t is None else t.to(dtype) for t in (mean, variance, weight, bias, before)
        )
    return _OPERATOR(mean, variance, weight, bias, before, eps)


def _check(mean, variance, weight, bias, before):
    operator = "fold_batch_norm"
    require_float(operator, mean)
    require(mean.dim() == 1, operator, f"mean has shape {tuple(mean.shape)}, expected (channels,)")
    for name, tensor in (("variance", variance), ("weight", weight), ("bias", bias), ("before", before)):
        if tensor is not None:
            require_same_options(operator, name, mean, tensor, "mean")
            message = f"{name} has shape {tuple(tensor.shape)}, expected {tuple(mean.shape)}"
            require(tensor.shape == mean.shape, operator, message)


def _compose(mean, variance, weight, bias, before, eps):
    _check(mean, variance, weight, bias, before)
    scale, shift = batch_norm_scale_and_shift(mean, variance, weight, bias, eps)
    if before is not None:
        shift = shift + before.double() * scale
    wide = accumulator(mean.dtype)
    return scale.to(wide), shift.to(wide)


def _fake(mean, variance, weight, bias, before, eps):
    _check(mean, variance, weight, bias, before)
    wide = accumulator(mean.dtype)
    return mean.new_empty(mean.shape, dtype=wide), mean.new_empty(mean.shape, dtype=wide)


_OPERATOR = define(
    "fold_batch_norm(Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, Tensor? before, float eps) "
    "-> (Tensor, Tensor)",
    _compose,
    _fake,
)
