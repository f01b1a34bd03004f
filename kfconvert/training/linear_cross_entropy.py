"""linear_cross_entropy: a linear head and its cross entropy in blocks of rows, which never stores all logits.

The forward also computes the gradients: three matrix products in all, as without fusion.
"""

import torch
import torch.nn.functional as F

from ..ops.double_backward import is_differentiated
from ..ops.norms import accumulator
from ..ops.registration import autocast, define, differentiate, require

# The most bytes of a block's logits in the accumulation type, and the number that its rows are a multiple of.
BLOCK_BYTES, ROWS = 128 * 2**20, 1024


def _outputs(hidden, weight, bias, labels, ignored, mean, smoothing, wanted):
    """Returns (loss, gradients of hidden, weight and bias, scale), before the first row. ``wanted``: which gradients.

    The gradients lack the factor ``scale``: one over the number of labels could be too small for a half type.
    """
    sizes = (), hidden.shape if wanted[0] else 0, weight.shape if wanted[1] else 0, weight.shape[0] if wanted[2] else 0
    loss, *gradients = (hidden.new_zeros(size, dtype=accumulator(hidden.dtype)) for size in sizes)
    return loss, *gradients, torch.ones_like(loss)


def _compute(hidden, weight, bias, labels, ignored, mean, smoothing, wanted):
    classes = weight.shape[0]
    if labels.is_cpu:  # a GPU does not synchronize, and gives NaN
        outside = labels[(labels != ignored) & ((labels < 0) | (labels >= classes))]
        if outside.numel():
            raise IndexError(f"Target {int(outside[0])} is out of bounds.")
    weight, bias = _aligned(weight, bias, hidden.dtype, smoothing)
    given = hidden, weight, bias, labels, ignored, mean, smoothing, wanted
    loss, of_hidden, of_weight, of_bias, scale = _outputs(*given)
    rows = max(1, BLOCK_BYTES // (ROWS * classes * loss.itemsize)) * ROWS
    # Blocks without labels run, too: only the device knows which.
    for start in range(0, hidden.shape[0], rows):
        x = hidden[start : start + rows]
        of_block, of_logits = _block(x, weight, bias, labels[start : start + rows], ignored, smoothing)
        loss += of_block
        if wanted[0]:
            _add_product(of_hidden[start : start + rows], of_logits, weight)
        if wanted[1]:
            _add_product(of_weight, of_logits.t(), x)
        if wanted[2]:
            of_bias += of_logits.sum(0, dtype=loss.dtype)
    if mean:
        count = (labels != ignored).sum().to(loss.dtype)
        loss, scale = loss / count, 1 / count.clamp_min(1)
    return loss, of_hidden, of_weight[:classes], of_bias[:classes], scale


def _aligned(weight, bias, dtype, smoothing):
    """Returns weight and bias in ``dtype``. On a GPU, products of half types are slow unless the number of classes is a
    multiple of 8: further classes get the probability 0."""
    missing = -weight.shape[0] % 8 if dtype.itemsize == 2 and not smoothing else 0
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if not missing:
        return weight, bias
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-torch.inf)


def _block(x, weight, bias, labels, ignored, smoothing):
    """Returns the sum of the losses, and the gradient of the logits."""
    logits, operators = F.linear(x, weight, bias), torch.ops.kfconvert
    loss, lse, none = operators.cross_entropy_inference(logits, labels, ignored, smoothing, 0)
    grad = operators.cross_entropy_backward(torch.ones_like(loss), logits, labels, lse, none, ignored, smoothing)
    return loss.sum(), grad


def _add_product(total, one, other):
    """Adds the product of two matrices to ``total``, which may have a wider dtype."""
    if one.dtype != total.dtype and one.is_cuda:
        batch = total[None]
        torch.baddbmm(batch, one[None], other[None], total.dtype, out=batch)
    else:
        total.addmm_(one.to(total.dtype), other.to(total.dtype))


def _save(ctx, inputs, output):
    ctx.dtypes = [each.dtype if wanted else None for each, wanted in zip(inputs, inputs[-1])]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the other outputs


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 8
    require(not is_differentiated(), "linear_cross_entropy", "it has no second derivative")
    *found, scale = ctx.saved_tensors
    factor = grad * scale
    # In the accumulation type: a half type would round the factor.
    found = [(each.to(factor.dtype) * factor).to(dtype) if dtype else None for each, dtype in zip(found, ctx.dtypes)]
    return *found, None, None, None, None, None


OPERATOR = define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, int ignored, bool mean, "
    "float smoothing, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _outputs,
)
differentiate(OPERATOR, _differentiate, _save)
autocast((OPERATOR,), lambda args, _: args)
