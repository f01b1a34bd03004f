"""Norms in plain ATen."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.fused.group_norm_act import reference as group_norm_act
from ...ops.fused.layer_norm_act import reference as layer_norm_act
from ...ops.fused.rms_norm_act import reference as rms_norm_act
from ...ops.norms import own_sum
from ...ops.standalone.norm_names import rms_eps, shape_weight_eps


def layer_norm_relu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "relu")


def layer_norm_gelu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "gelu")


def layer_norm_silu(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> Tensor:
    return layer_norm_act(x, normalized_shape, weight, bias, eps, "silu")


def add_layer_norm(x, residual, normalized_shape, weight=None, bias=None, eps=1e-5) -> tuple[Tensor, Tensor]:
    return own_sum(layer_norm_act(x, normalized_shape, weight, bias, eps, "none", residual, True), residual)


def rms_norm(x, normalized_shape, weight=None, eps=None) -> Tensor:
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps))


def rms_norm_gelu(x, normalized_shape=None, weight=None, eps=None) -> Tensor:
    normalized_shape, weight, eps = shape_weight_eps("rms_norm_gelu", normalized_shape, weight, eps)
    return rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), "gelu")


def add_rms_norm(x, residual, normalized_shape, weight=None, eps=None) -> tuple[Tensor, Tensor]:
    results = rms_norm_act(x, normalized_shape, weight, rms_eps(x, eps), "none", residual, True)
    return own_sum(results, residual)


def group_norm_silu(x, num_groups, weight=None, bias=None, eps=1e-5) -> Tensor:
    return group_norm_act(x, num_groups, weight, bias, eps, "silu")


def batch_norm_relu(x, weight, bias, running_mean, running_var, training=False, momentum=0.1, eps=1e-5) -> Tensor:
    return F.relu(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps))
