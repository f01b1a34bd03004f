"""Norms under their common names, each a call of the operator that its docstring names.

All functions take float64, float32, float16 or bfloat16 (half types are computed in float32) and have a backward
pass. Incompatible shapes, dtypes or devices raise a one-line RuntimeError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..declaration import declare
from ..fused.group_norm_act import group_norm_act
from ..fused.layer_norm_act import layer_norm_act
from ..fused.rms_norm_act import rms_norm_act
from ..norms import accumulator, own_sum
from ..registration import require
from .batch_norm_act import batch_norm_act

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm_relu",
    "group_norm_silu",
    "layer_norm_gelu",
    "layer_norm_relu",
    "layer_norm_silu",
    "rms_norm",
    "rms_norm_gelu",
]

Shape = int | tuple[int, ...]


def _computes_statistics(x, weight, bias, running_mean, running_var, training=False, momentum=0.1, eps=1e-5):
    return "the kernel takes the running statistics" if training else None


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), t(columns)))
def layer_norm_relu(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes ``relu(layer_norm(x))``; :func:`kfconvert.ops.layer_norm_act` has the shapes and dtypes."""
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "relu")


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), t(columns)))
def layer_norm_gelu(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes ``gelu(layer_norm(x))``, the exact (erf) GELU; see :func:`layer_norm_relu`."""
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "gelu")


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns), t(columns)))
def layer_norm_silu(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes ``silu(layer_norm(x))``; see :func:`layer_norm_relu`."""
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "silu")


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(rows, columns), t(rows, columns), (columns,), t(columns), t(columns)),
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Computes ``(layer_norm(x + residual), x + residual)``; :func:`kfconvert.ops.layer_norm_act` with ``return_sum``.

    residual: x's shape, or a shape that repeats over its leading dimensions; None is 0.
    """
    results = layer_norm_act(x, normalized_shape, weight, bias, eps, residual=residual, return_sum=True)
    return own_sum(results, residual)


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns)))
def rms_norm(x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Computes ``x / sqrt(mean(x^2) + eps) * weight``; :func:`kfconvert.ops.rms_norm_act`.

    eps: None is the machine epsilon of the computation dtype, as in ``torch.nn.functional.rms_norm``: 2.2e-16 for
    float64, 1.2e-7 for all others.
    """
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps))


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), (columns,), t(columns)))
def rms_norm_gelu(
    x: Tensor,
    normalized_shape: Shape | Tensor | None = None,
    weight: Tensor | float | None = None,
    eps: float | None = None,
) -> Tensor:
    """Computes ``gelu(rms_norm(x))``, the exact (erf) GELU; see :func:`rms_norm`.

    Call ``rms_norm_gelu(x, normalized_shape, weight, eps)`` or ``rms_norm_gelu(x, weight, eps)``, which uses the
    shape of weight.

    Raises:
        TypeError: neither a shape nor a weight, or a duplicate argument. RuntimeError: see above.
    """
    normalized_shape, weight, eps = shape_weight_eps("rms_norm_gelu", normalized_shape, weight, eps)
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), "gelu")


def shape_weight_eps(operator, normalized_shape, weight, eps):
    """Returns (shape, weight, eps); a call may pass the weight in place of the shape, and eps in place of weight."""
    if isinstance(normalized_shape, Tensor):
        if isinstance(weight, Tensor) or (weight is not None and eps is not None):
            ways = "(x, normalized_shape, weight, eps) or (x, weight, eps)"
            raise TypeError(f"kfconvert::{operator}: weight must be given once: {ways}")
        normalized_shape, weight, eps = None, normalized_shape, eps if weight is None else weight
    if not isinstance(weight, (Tensor, type(None))):
        raise TypeError(f"kfconvert::{operator}: weight must be a tensor, got {type(weight).__name__}")
    if normalized_shape is None:
        if weight is None:
            raise TypeError(f"kfconvert::{operator}: normalized_shape or weight must be given")
        normalized_shape = tuple(weight.shape)
    return normalized_shape, weight, eps


@declare(group="norm", example=lambda t, rows, columns: (t(rows, columns), t(columns), (columns,), t(columns)))
def add_rms_norm(
    x: Tensor, residual: Tensor | None, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """Computes ``(rms_norm(x + residual), x + residual)``; :func:`kfconvert.ops.rms_norm_act` with ``return_sum``.

    residual: x's shape, or a shape that repeats over its leading dimensions; None is 0.
    eps: see :func:`rms_norm`.
    """
    results = rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), residual=residual, return_sum=True)
    return own_sum(results, residual)


@declare(group="norm", example=lambda t, rows, columns: (t(2, 6, 5), 3, t(6), t(6)))
def group_norm_silu(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes ``silu(group_norm(x))``; :func:`kfconvert.ops.group_norm_act` has the shapes and dtypes."""
    return group_norm_act(x, num_groups, weight, bias, eps, "silu")


@declare(
    group="norm",
    example=lambda t, rows, columns: (t(rows, columns), t(columns), t(columns), t(columns), t(columns).square()),
    why_aten=_computes_statistics,
)
def batch_norm_relu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes ``relu(batch_norm(x))``, in x's dtype and shape. Unlike F.batch_norm, weight and bias come before the
    statistics.

    In eval mode, this is :func:`kfconvert.ops.batch_norm_act`; in training, F.batch_norm, which updates the running
    statistics, and an in-place ReLU.

    Args:
        x: (N, C, ...).
        weight, bias, running_mean, running_var: (C,), on x's device and of one dtype: x's, or float32 for
            a half type. Weight and bias may be None. In training, both running statistics may be None.
        momentum: weight of the new statistics in the updated ones.
        eps: added to the variance.

    Raises:
        ValueError: in training, a single value per channel. RuntimeError: see above; in training, from F.batch_norm.
    """
    if not training:
        given = running_mean is not None and running_var is not None
        require(given, "batch_norm_relu", "running_mean and running_var are needed outside of training")
        return batch_norm_act(x, running_mean, running_var, weight, bias, eps, "relu")
    # ATen's backward of (N, C) on the CPU is wrong with a strided weight.
    weight = None if weight is None else weight.contiguous()
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps).relu_()


def rms_eps(x: Tensor, eps: float | None) -> float:
    """Returns eps, or the default of :func:`rms_norm` if it is None."""
    if eps is not None:
        return eps
    return torch.finfo(accumulator(x.dtype)).eps
