"""cross_entropy: reads the logits once for the loss and once for the gradient, and stores no probabilities."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...torch_state import being_traced, transformed
from ..arguments import as_integer, require_share
from ..declaration import declare
from ..double_backward import differentiable_gradients, is_differentiated
from ..norms import accumulator
from ..registration import (
    autocast,
    cast_floats,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    require_float,
    require_same_device,
    require_shape,
    wants_gradient,
)

__all__ = ["cross_entropy"]


@declare(group="reduction", example=lambda t, rows, columns: (t(rows, columns), torch.arange(rows, device=t().device)))
def cross_entropy(
    x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Computes ``torch.nn.functional.cross_entropy`` of class indices without class weights.

    Args:
        x: logits, (rows, classes); float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        target: (rows,), int64, on x's device; rows with target ``ignore_index`` do not count. Any other value
            outside the classes is an error on the CPU, and gives a NaN loss on a GPU, without synchronization.
        reduction: "none", "sum" or "mean" (over the rows that count; NaN if there are none).
        label_smoothing: share of each target that is distributed evenly over all classes.

    Returns:
        (rows,) for "none", else one element; x's dtype.

    Raises:
        ValueError: an unknown reduction, or smoothing not between 0 and 1. RuntimeError: incompatible shapes, dtypes,
            devices or targets.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}")
    require_share("label_smoothing", label_smoothing)
    ignore_index = as_integer("cross_entropy", "ignore_index", ignore_index)
    _check(x, target)
    if not has_kernels(x):
        # If Python can read the values.
        if x.is_cpu and type(target) is Tensor and not (being_traced() or transformed()):
            _check_targets(x, target, ignore_index)
        return F.cross_entropy(
            x, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    operator = _DIFFERENTIABLE if wants_gradient(x) else _INFERENCE
    result, _, _ = operator(x, target, ignore_index, label_smoothing, _REDUCTIONS[reduction])
    if reduction == "none" and not torch.is_autocast_enabled(x.device.type):
        return result.to(x.dtype)
    return result


# The same numbers as in csrc/common/cross_entropy.h.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _check(x, target):
    operator = "cross_entropy"
    require_float(operator, x)
    require(x.dim() == 2, operator, f"x has shape {tuple(x.shape)}, expected (rows, classes)")
    require_same_device(operator, "target", x, target)
    require(target.dtype == torch.int64, operator, "target must be int64")
    require_shape(operator, "target", target, x.shape[:1])


def _check_targets(x, target, ignored):
    """Makes the checks of the compiled kernel's host code."""
    counts = target[target != ignored]
    least, most = counts.aminmax() if counts.numel() else (0, 0)
    fits = least >= 0 and (most < x.shape[1] or not counts.numel())
    require(fits, "cross_entropy", f"target holds {int(least)} to {int(most)}, x has {x.shape[1]} classes")


def _compose(x, target, ignored, smoothing, reduction):
    _check(x, target)
    wide = x.to(accumulator(x.dtype))
    largest = wide.amax(1)
    rest = (wide - largest[:, None]).exp().sum(1).log()
    counts = target != ignored
    hit = wide.gather(1, torch.where(counts, target, 0)[:, None])[:, 0]
    loss = (1 - smoothing) * (rest + (largest - hit))
    if smoothing:
        loss = loss + smoothing * (rest + (largest - wide.mean(1)))
    loss, lse = torch.where(counts, loss, 0), torch.stack((largest, rest), 1)
    if reduction == _REDUCTIONS["none"]:
        return loss, lse, loss.new_empty(0)
    weight = 1 / counts.sum().to(wide.dtype) if reduction == _REDUCTIONS["mean"] else loss.new_ones(())
    return (loss.sum() * weight).to(x.dtype), lse, weight.reshape(1)


def _fake(x, target, ignored, smoothing, reduction):
    _check(x, target)
    wide = accumulator(x.dtype)
    lse = x.new_empty((x.shape[0], 2), dtype=wide)
    if reduction == _REDUCTIONS["none"]:
        return lse.new_empty(x.shape[0]), lse, lse.new_empty(0)
    return x.new_empty(()), lse, lse.new_empty(1)


def _compose_backward(grad, x, target, lse, weight, ignored, smoothing):
    counts = target != ignored
    grad_x = torch.exp(x.to(lse.dtype) - lse[:, :1] - lse[:, 1:]) - smoothing / x.shape[1]
    hit = torch.full_like(lse[:, :1], smoothing - 1)
    grad_x = grad_x.scatter_add(1, torch.where(counts, target, 0)[:, None], hit)
    grad_x = grad.to(lse.dtype).reshape(-1, 1) * (weight if weight.numel() else 1) * grad_x
    return torch.where(counts[:, None], grad_x, 0).to(x.dtype).contiguous()


def _save(ctx, inputs, output):
    x, target, *ctx.options = inputs
    _, lse, weight = output
    ctx.save_for_backward(x, target, lse, weight)
    ctx.mark_non_differentiable(lse, weight)
    ctx.set_materialize_grads(False)  # no zeros for lse and weight


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 5
    x, target, lse, weight = ctx.saved_tensors
    if is_differentiated():
        (of_x,) = differentiable_gradients(lambda x: _compose(x, target, *ctx.options)[0], (x,), grad)
    else:
        ignored, smoothing, _ = ctx.options
        of_x = _BACKWARD(grad, x, target, lse, weight, ignored, smoothing)
    return of_x, None, None, None, None


_OPERATOR, _INFERENCE = define_with_twin(
    "cross_entropy(Tensor x, Tensor target, int ignored, float smoothing, int reduction) -> (Tensor, Tensor, Tensor)",
    _compose,
    _fake,
)
_BACKWARD = define(
    "cross_entropy_backward(Tensor grad, Tensor x, Tensor target, Tensor lse, Tensor weight, int ignored, "
    "float smoothing) -> Tensor",
    _compose_backward,
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), lambda args, device_type: cast_floats(args, torch.float32, device_type))
