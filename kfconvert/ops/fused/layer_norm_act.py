"""layer_norm_act: ``s = x + residual; y = act((s - mean(s)) / sqrt(var(s) + eps) * weight + bias)``."""

import torch
import torch.nn.functional as F

from ..activations import CODES, apply_activation
from ..declaration import declare
from ..norms import as_shape, check_norm
from ..registration import has_kernels, wants_gradient
from .norm_operators import NormOperators

__all__ = ["layer_norm_act"]


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), t(columns)))
def layer_norm_act(
    x: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    return_sum: bool = False,
    negative_slope: float = 0.01,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes ``act(layer_norm(x + residual))``, contiguous, in x's dtype; with ``return_sum`` also x + residual.

    Args:
        x: (..., *normalized_shape); float64, float32, float16 or bfloat16. A non-contiguous layout costs a
            copy.
        normalized_shape: the last dimensions of x, which are normalized.
        weight, bias: normalized_shape; x's dtype, or both float32 for a half type.
        eps: added to the variance.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        residual: x's dtype and device, and x's shape or a shape that repeats over its leading dimensions
            (position embeddings). Half types are added and normalized in float32; the returned sum is
            rounded to x's dtype. If a gradient is needed, the rounded sum is normalized, because the backward
            has only that sum.
        return_sum: return (y, x + residual): the residual stream of a pre-norm transformer.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code, eps = CODES[activation], float(eps)
    shape = as_shape(normalized_shape)
    if not has_kernels(x):
        check_norm("layer_norm_act", x, residual, shape, weight, bias)
        s = x if residual is None else x + residual
        y = apply_activation(F.layer_norm(s, shape, weight, bias, eps), activation, negative_slope)
        return (y, s) if return_sum else y
    needs_grad = wants_gradient(x, weight, bias, residual)
    if return_sum and residual is not None:
        operator = _NORM.add_differentiable if needs_grad else _NORM.add_inference
        return operator(x, residual, shape, weight, bias, eps, code, negative_slope)
    operator = _NORM.differentiable if needs_grad else _NORM.inference
    y = operator(x, residual, shape, weight, bias, eps, code, negative_slope)
    return (y, x) if return_sum else y


def _normalise(s, shape, weight, bias, eps):
    affine = weight if weight is not None else bias
    # ATen normalizes mixed dtypes only on the CPU, so the wider dtype is used on every device.
    wide = s if affine is None else s.to(affine.dtype)
    return F.layer_norm(wide, shape, weight, bias, eps).to(s.dtype)


_NORM = NormOperators("layer_norm_act", _normalise, ("weight", "bias"), centred=True)
