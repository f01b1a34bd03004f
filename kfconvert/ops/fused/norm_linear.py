"""norm_linear: an RMS norm, with a residual addition before it, and the linear layers that read its result, for a few
rows of x.

On CUDA, one kernel computes up to 16 rows of a half type, as in a step of generation. Each block of threads normalizes
x itself, while it loads the first part of the weight. In a CUDA graph, the kernel reads the weights of norm and layers
before earlier kernels have finished, so nothing in the graph may write to them.
"""

from ..registration import define, require
from .quantized_linear import quantized_linear, takes_few_rows
from .rms_norm_act import reference
from .skinny_linear import skinny_linear, takes_skinny

_MOST_BYTES = 32 << 10  # of x and the weight of the norm


def takes_norm_linear(x, norm_weight, weights, scales):
    """Whether the kernel accepts x (..., in) and these tensors, which have the shapes of :data:`norm_linear`."""
    if not takes_skinny(x, x.shape[-1]) or x.nbytes + norm_weight.nbytes > _MOST_BYTES:
        return False
    if norm_weight.dtype != x.dtype or not norm_weight.is_contiguous() or norm_weight.data_ptr() % 16:
        return False
    if scales:
        return all([takes_few_rows(x, weight) for weight in weights])
    weight = weights[0]
    return weight.stride(1) == 1 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def _compose(x, residual, norm_weight, eps, offset, weights, scales, bias, code, negative_slope, gated, gate_first):
    name = "norm_linear"
    require(len(weights) == 1 or bool(scales), name, "expected one weight, or a scale for each")
    require(norm_weight.shape == x.shape[-1:], name, "the weight of the norm has another size than x")
    require(residual is None or residual.shape == x.shape, name, "x and residual differ in shape")
    y, s = reference(x, norm_weight.shape, norm_weight, eps, "none", residual, True, offset)
    if scales:
        y = quantized_linear(y, weights, scales, code, negative_slope, gated)
    else:
        y = skinny_linear(y, weights[0], bias, code, negative_slope, gated, gate_first)
    return y, x.new_empty(0) if residual is None else s.contiguous()


# x, residual: (..., in); norm_weight: (in,); weights and scales: as for quantized_linear, or one weight and no scales,
# and the bias, as for skinny_linear. Returns y (..., out), and x + residual, which has no elements without a residual.
# No gradients. On CUDA, raises RuntimeError for tensors that ``takes_norm_linear`` refuses.
norm_linear = define(
    "norm_linear(Tensor x, Tensor? residual, Tensor norm_weight, float eps, float offset, Tensor[] weights, "
    "Tensor[] scales, Tensor? bias, int activation, float negative_slope, bool gated, bool gate_first) "
    "-> (Tensor, Tensor)",
    _compose,
)
