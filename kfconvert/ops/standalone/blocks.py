"""Blocks of models, composed of the operators that their docstrings name.

All functions take float64, float32, float16 or bfloat16, with one dtype and device per call (autocast aligns dtypes),
and have a backward pass. Incompatible arguments raise RuntimeError, and an activation that is not in
:data:`kfconvert.ops.ACTIVATIONS` raises ValueError. Convolutions are two-dimensional: x is (N, C, H, W) or (C, H, W),
contiguous or channels-last. For stride, padding, dilation and groups, see torch.nn.functional.conv2d.
"""

import torch.nn.functional as F
from torch import Tensor

from ..arguments import require_share
from ..declaration import declare
from ..fused.conv_act import conv_act
from ..fused.linear_act import linear_act
from ..norms import accumulator
from ..registration import has_kernels, require, require_same_options, require_shape, wants_gradient
from .batch_norm_act import batch_norm_act

__all__ = ["conv2d_bn_act", "conv2d_gelu_dropout", "depthwise_pointwise", "ffn_block", "fused_linear_activation"]

Pair = int | tuple[int, int]


@declare(group="block", example=lambda t, rows, columns: (t(rows, 8), t(9, 8), t(9), "relu"), runs="linear_act")
def fused_linear_activation(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Computes ``act(x W^T + b)``, of shape (..., out); an alias of :func:`kfconvert.ops.linear_act`.

    x: (..., in); weight: (out, in); bias: (out,) or None.
    """
    return linear_act(x, weight, bias, activation)


@declare(
    group="block",
    example=lambda t, rows, columns: (t(rows, 8), t(9, 8), t(9), t(4, 9), t(4)),
    runs="two calls of linear_act",
)
def ffn_block(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """Computes ``dropout(act(x W1^T + b1)) W2^T + b2``, of shape (..., out), by :func:`kfconvert.ops.linear_act`.

    x: (..., in); w1: (hidden, in); w2: (out, hidden); b1: (hidden,) or None; b2: (out,) or None.
    dropout_p: fraction of hidden values that ``F.dropout`` drops in ``training``; ValueError unless between 0 and 1.
    This is the first dropout of the feed-forward block of ``torch.nn.TransformerEncoderLayer``.
    """
    require_share("dropout_p", dropout_p)
    hidden = linear_act(x, w1, b1, activation)
    return linear_act(F.dropout(hidden, dropout_p, training) if dropout_p else hidden, w2, b2)


@declare(
    group="block",
    example=lambda t, rows, columns: (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4), t(4), t(4).abs(), t(4), t(4), "relu"),
    runs="conv_act, or a convolution and scale_shift_act",
)
def conv2d_bn_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    activation: str,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes ``act(batch_norm(conv(x)))`` with the running statistics, for inference: (N, out, H', W').

    :func:`kfconvert.ops.batch_norm_act` follows the convolution, because folding the norm into the weight in every
    call is slower. ``kfconvert.modules.FusedConv2dBNReLU`` caches a folded weight.

    Args:
        weight: (out, C / groups, height, width); bias: (out,) or None.
        running_mean, running_var, bn_weight, bn_bias: (out,), any float dtype; the last two may be None. The
            statistics have no gradient.
        eps: added to the variance.
    """
    operator = "conv2d_bn_act"
    eps = float(eps)
    _require_four_dimensions(operator, "weight", weight)
    if bias is not None:
        require_same_options(operator, "bias", x, bias)
        require_shape(operator, "bias", bias, weight.shape[:1])
    # cuDNN adds a bias in a separate pass. The statistics have no derivative, so the bias must not require one.
    if x.is_cuda and has_kernels(x) and bias is not None and not wants_gradient(bias):
        running_mean, bias = running_mean.to(accumulator(x.dtype)) - bias, None
    y = conv_act(x, weight, bias, None, stride, padding, dilation, groups)
    given = running_mean, running_var, bn_weight, bn_bias
    if any(t is not None and t.dtype != y.dtype for t in given):
        given = (None if t is None else t.to(accumulator(y.dtype)) for t in given)  # type: ignore[assignment]  # still 4
    batch = y if y.dim() == 4 else y.unsqueeze(0)
    return batch_norm_act(batch, *given, eps, activation).reshape(y.shape)


@declare(
    group="block",
    example=lambda t, rows, columns: (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4), 0.5),
    runs="conv_act and F.dropout",
)
def conv2d_gelu_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    training: bool = True,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Computes ``dropout(gelu(conv(x)))``, the exact (erf) GELU: :func:`kfconvert.ops.conv_act`, then ``F.dropout``.

    weight: (out, C / groups, height, width); bias: (out,) or None. p: fraction of values dropped in ``training``;
    ValueError unless between 0 and 1.
    """
    require_share("p", p)
    _require_four_dimensions("conv2d_gelu_dropout", "weight", weight)
    return F.dropout(conv_act(x, weight, bias, None, stride, padding, dilation, groups, "gelu"), p, training)


@declare(
    group="block",
    example=lambda t, rows, columns: (t(2, 3, 8, 8), t(6, 1, 3, 3), t(6), t(4, 6, 1, 1), t(4), "relu"),
    runs="two calls of conv_act",
)
def depthwise_pointwise(
    x: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor | None,
    pointwise_weight: Tensor,
    pointwise_bias: Tensor | None,
    activation: str,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
) -> Tensor:
    """Computes ``act(pointwise(depthwise(x)))``, a separable convolution (Chollet, arXiv:1610.02357), then act.

    Two calls of :func:`kfconvert.ops.conv_act`, with nothing between them, as in Keras's SeparableConv2D.

    Args:
        depthwise_weight: (C * multiplier, 1, height, width), with groups = C, to which stride, padding and
            dilation apply; depthwise_bias: (C * multiplier,) or None.
        pointwise_weight: (out, C * multiplier, 1, 1); pointwise_bias: (out,) or None.
    """
    operator = "depthwise_pointwise"
    _require_four_dimensions(operator, "depthwise_weight", depthwise_weight)
    require(x.dim() in (3, 4), operator, f"x has shape {tuple(x.shape)}, expected (N, C, H, W) or (C, H, W)")
    require(
        pointwise_weight.shape[1:] == (depthwise_weight.shape[0], 1, 1),
        operator,
        f"pointwise_weight has shape {tuple(pointwise_weight.shape)}, expected (out, "
        f"{depthwise_weight.shape[0]}, 1, 1)",
    )
    y = conv_act(x, depthwise_weight, depthwise_bias, None, stride, padding, dilation, x.shape[-3])
    return conv_act(y, pointwise_weight, pointwise_bias, activation=activation)


def _require_four_dimensions(operator, name, tensor):
    shape = tuple(tensor.shape)
    message = f"{name} has shape {shape}, expected (out, in / groups, height, width)"
    require(len(shape) == 4, operator, message)
