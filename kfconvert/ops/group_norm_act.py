"""group_norm_act: ``y = act(group_norm(x))``, one pass over memory less than the two operators.

group_norm(x) = (x - mean) / sqrt(var + eps) * weight + bias, mean and (biased) variance over the
channels of a group and all positions (Wu and He, arXiv:1803.08494). Where a gradient is needed it runs as
plain ATen calls, whose formulas apply.
"""

import torch

from .activations import BY_CODE, CODES, apply_activation
from .bias_act import spread
from .norms import wants_gradient
from .registration import (
    autocast,
    cast_floats,
    cast_to_widest,
    define_with_twin,
    differentiate_by_decomposition,
    has_kernels,
    require,
    require_float,
    require_same_options,
)


def reference(x, num_groups, weight=None, bias=None, eps=1e-5, activation="none", negative_slope=0.01):
    """The definition of :func:`group_norm_act` in plain ATen, differentiable."""
    return apply_activation(_normalise(x, num_groups, weight, bias, eps), activation, negative_slope)


def _normalise(x, num_groups, weight, bias, eps):
    if x.numel() > 0:
        # Not F.group_norm, which refuses groups of one value.
        return torch.group_norm(x, num_groups, weight, bias, eps)
    # ATen refuses some of these; the gradients of weight and bias are zeros.
    y = x.clone() if weight is None else x * spread(weight, x, 1)
    return y if bias is None else y + spread(bias, x, 1)


def group_norm_act(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    negative_slope: float = 0.01,
) -> torch.Tensor:
    """``act(group_norm(x))``, contiguous, in x's dtype and shape.

    Args:
        x: (N, C, ...); float64, float32, float16 or bfloat16 (the half types are computed in float32); any
        layout other than contiguous costs a copy.
        num_groups: divides C.
        weight, bias: (C,), x's dtype and device.
        eps: added to the variance.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: shapes, dtypes or devices that do not fit.
    """
    code = CODES[activation]
    if not has_kernels(x):
        _check(x, num_groups, weight, bias)
        return reference(x.contiguous(), num_groups, weight, bias, eps, activation, negative_slope)
    if wants_gradient(x, weight, bias, None):
        return _OPERATOR(x, num_groups, weight, bias, eps, code, negative_slope)
    return _INFERENCE(x, num_groups, weight, bias, eps, code, negative_slope)


def _check(x, num_groups, weight, bias):
    operator = "group_norm_act"
    require_float(operator, x)
    require(x.dim() >= 2, operator, f"x has shape {tuple(x.shape)}, expected (N, C, ...)")
    channels = x.shape[1]
    require(
        num_groups > 0 and channels % num_groups == 0,
        operator,
        f"{channels} channels do not make {num_groups} groups",
    )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            require_same_options(operator, name, x, tensor)
            require(
                tensor.dim() == 1 and tensor.shape[0] == channels,
                operator,
                f"{name} has shape {tuple(tensor.shape)}, but x has {channels} channels in dim 1",
            )


def _compose(x, num_groups, weight, bias, eps, code, negative_slope):
    _check(x, num_groups, weight, bias)
    return _decompose(x, num_groups, weight, bias, eps, code, negative_slope)


def _fake(x, num_groups, weight, bias, eps, code, negative_slope):
    _check(x, num_groups, weight, bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _decompose(x, num_groups, weight, bias, eps, code, negative_slope):
    y = _normalise(x.contiguous(), num_groups, weight, bias, eps)
    return BY_CODE[code].reference(y, negative_slope)


def _autocast_rule(args, device_type):
    """ATen's: float32 on CUDA; on the CPU the dtypes stay, which must be one here: the widest."""
    if device_type == "cuda":
        return cast_floats(args, torch.float32, device_type)
    return cast_to_widest(args, device_type)


_OPERATOR, _INFERENCE = define_with_twin(
    "group_norm_act(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, int activation, "
    "float negative_slope) -> Tensor",
    _compose,
    _fake,
)
differentiate_by_decomposition(_OPERATOR, _decompose)
autocast((_OPERATOR, _INFERENCE), _autocast_rule)
