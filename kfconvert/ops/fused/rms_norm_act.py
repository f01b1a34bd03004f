"""rms_norm_act: ``s = x + residual; y = act(s / sqrt(mean(s^2) + eps) * (offset + weight))``.

Root mean square layer normalization, Zhang and Sennrich, arXiv:1910.07467.
"""

import torch

from ..activations import CODES, apply_activation
from ..declaration import declare
from ..norms import accumulator, as_shape, check_norm
from ..registration import has_kernels, wants_gradient
from .norm_operators import NormOperators

__all__ = ["rms_norm_act"]


def reference(
    x,
    normalized_shape,
    weight=None,
    eps=1e-6,
    activation="none",
    residual=None,
    return_sum=False,
    offset=0.0,
    negative_slope=0.01,
):
    """Computes :func:`rms_norm_act` in plain ATen, differentiable."""
    s = x if residual is None else x + residual
    y = apply_activation(_normalise(s, as_shape(normalized_shape), weight, eps, offset), activation, negative_slope)
    return (y, s) if return_sum else y


def _normalise(s, shape, weight, eps, offset):
    wide = s.to(accumulator(s.dtype))
    y = wide * (wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(s.dtype)


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), 1e-6, "silu"),
    timed_as="rms_norm, add_rms_norm and rms_norm_gelu",
)
def rms_norm_act(
    x: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    return_sum: bool = False,
    offset: float = 0.0,
    negative_slope: float = 0.01,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes ``act(rms_norm(x + residual))``, contiguous, in x's dtype; with ``return_sum`` also x + residual.

    Half types are computed in float32 and rounded once, at the end. Models that round the normalized values before
    the multiplication by the weight (Llama, T5) have an additional rounding. Models that multiply in float32 (Gemma,
    OLMo 2) have the same rounding.

    Args:
        x: (..., *normalized_shape); float64, float32, float16 or bfloat16. A non-contiguous layout costs a
            copy.
        normalized_shape: the last dimensions of x, which are normalized.
        weight: normalized_shape; x's dtype, or float32 for a half type.
        eps: added to the mean of the squares.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        residual: x's dtype and device, and x's shape or a shape that repeats over its leading dimensions. The
            half types are added and normalized in float32; the returned sum is rounded to x's dtype.
        return_sum: return (y, x + residual): the residual stream of a pre-norm transformer.
        offset: added to the weight; 1 in Gemma, whose stored weights are centered at 0.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    code, eps = CODES[activation], float(eps)
    shape = as_shape(normalized_shape)
    if not has_kernels(x):
        check_norm("rms_norm_act", x, residual, shape, weight)
        return reference(x, shape, weight, eps, activation, residual, return_sum, offset, negative_slope)
    needs_grad = wants_gradient(x, weight, residual)
    if return_sum and residual is not None:
        operator = _NORM.add_differentiable if needs_grad else _NORM.add_inference
        return operator(x, residual, shape, weight, eps, code, negative_slope, offset)
    operator = _NORM.differentiable if needs_grad else _NORM.inference
    y = operator(x, residual, shape, weight, eps, code, negative_slope, offset)
    return (y, x) if return_sum else y


_NORM = NormOperators("rms_norm_act", _normalise, ("weight",), centred=False, more=("offset",))
