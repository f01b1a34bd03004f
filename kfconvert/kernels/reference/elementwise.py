"""Elementwise operators in plain ATen."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.act_mul import reference as act_mul
from ...ops.fused.bias_act import reference as bias_act
from ...ops.fused.bias_act import spread
from ...ops.fused.combine_act import reference as combine_act
from ..named import over

_PAIRS = ("add_mul_exp", "add_relu", "add_sigmoid", "mish_scale", "mul_tanh", "multiply_relu")
_NAMED = {
    **over({"combine_act": combine_act}, *_PAIRS),
    **over({"act_mul": act_mul}, "geglu", "swish_multiply"),
    **over({"bias_act": bias_act}, "bias_gelu", "bias_relu", "bias_silu"),
}
globals().update(_NAMED)

__all__ = ["bias_dropout_add", "gelu_dropout", *_NAMED]


def gelu_dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(F.gelu(x), p, training)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.5, training: bool = True, dim: int = -1
) -> Tensor:
    return F.dropout(x if bias is None else x + spread(bias, x, dim), p, training) + residual
