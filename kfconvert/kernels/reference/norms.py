"""Norms in plain ATen."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.group_norm_act import reference as group_norm_act
from ...ops.fused.layer_norm_act import reference as layer_norm_act
from ...ops.fused.rms_norm_act import reference as rms_norm_act
from ..named import over

_LAYER_NORMS = ("add_layer_norm", "layer_norm_gelu", "layer_norm_relu", "layer_norm_silu")
_NAMED = {
    **over({"layer_norm_act": layer_norm_act}, *_LAYER_NORMS),
    **over({"rms_norm_act": rms_norm_act}, "add_rms_norm", "rms_norm", "rms_norm_gelu"),
    **over({"group_norm_act": group_norm_act}, "group_norm_silu"),
}
globals().update(_NAMED)

__all__ = ["batch_norm_relu", *_NAMED]


def batch_norm_relu(x, weight, bias, running_mean, running_var, training=False, momentum=0.1, eps=1e-5) -> Tensor:
    return F.relu(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps))
