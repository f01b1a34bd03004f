"""norm_linear: an RMS or layer norm, with a residual addition before it, and the linear layers that read its result,
for a few rows of x.

On CUDA, one kernel computes up to 16 rows of a half type, as in a step of generation. Each block of threads normalizes
x itself, while it loads the first part of the weight. In a CUDA graph, the kernel reads the weights of norm and layers
before earlier kernels have finished, so nothing in the graph may write to them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..registration import define, require
from .quantized_linear import quantized_linear, takes_few_rows
from .rms_norm_act import reference
from .skinny_linear import skinny_linear, takes_skinny

_MOST_BYTES = 32 << 10  # of x, and weight and bias of the norm


class RowNorm(NamedTuple):
    """A norm of rows: an RMS norm with the factors ``offset + weight``; with ``centers``, a layer norm.

    weight, bias: (in,).
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    offset: float
    centers: bool


def takes_norm_linear(x, norm, weights, scales):
    """Whether the kernel accepts x (..., in) and these tensors, which have the shapes of :data:`norm_linear`.

    norm: a ``RowNorm``."""
    of_norm = [each for each in (norm.weight, norm.bias) if each is not None]
    if (
        norm.weight is None
        or not takes_skinny(x, x.shape[-1])
        or sum(each.nbytes for each in (x, *of_norm)) > _MOST_BYTES
    ):
        return False
    if any(each.dtype != x.dtype or not each.is_contiguous() or each.data_ptr() % 16 for each in of_norm):
        return False
    if scales:
        return all([takes_few_rows(x, weight) for weight in weights])
    weight = weights[0]
    return weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def _compose(
    x, residual, norm_weight, norm_bias, eps, offset, centers, weights, scales, bias, code, negative_slope, gated,
    gate_first,
):  # fmt: skip
    name = "norm_linear"
    require(len(weights) == 1 or bool(scales), name, "expected one weight, or a scale for each")
    require(norm_weight.shape == x.shape[-1:], name, "the weight of the norm has another size than x")
    require(residual is None or residual.shape == x.shape, name, "x and residual differ in shape")
    require(norm_bias is None or norm_bias.shape == x.shape[-1:], name, "the bias of the norm has another size than x")
    s = x if residual is None else x + residual
    if centers:
        y = F.layer_norm(s, norm_weight.shape, norm_weight + offset, norm_bias, eps)
    else:
        y = reference(s, norm_weight.shape, norm_weight, eps, offset=offset)
        y = y if norm_bias is None else y + norm_bias
    if scales:
        y = quantized_linear(y, weights, scales, code, negative_slope, gated)
    else:
        y = skinny_linear(y, weights[0], bias, code, negative_slope, gated, gate_first)
    return y, x.new_empty(0) if residual is None else s.contiguous()


# x, residual: (..., in); norm_weight, norm_bias, eps, offset, centers: a ``RowNorm``; weights and scales: as for
# quantized_linear, or one weight and no scales, and the bias, as for skinny_linear. Returns y (..., out), and
# x + residual, which has no elements without a residual. No gradients. On CUDA, raises RuntimeError for tensors that
# ``takes_norm_linear`` refuses.
norm_linear = define(
    "norm_linear(Tensor x, Tensor? residual, Tensor norm_weight, Tensor? norm_bias, float eps, float offset, "
    "bool centers, Tensor[] weights, Tensor[] scales, Tensor? bias, int activation, float negative_slope, bool gated, "
    "bool gate_first) -> (Tensor, Tensor)",
    _compose,
)
