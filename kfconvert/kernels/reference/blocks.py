"""Sequences of layers in plain ATen."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import activations


def fused_linear_activation(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return activations.apply_activation(F.linear(x, weight, bias), activation)


def ffn_block(x, w1, b1, w2, b2, activation="gelu", dropout_p=0.0, training=True) -> Tensor:
    hidden = F.dropout(fused_linear_activation(x, w1, b1, activation), dropout_p, training)
    return F.linear(hidden, w2, b2)


def embedding_layer_norm(ids, word, position, token_type, weight, bias, eps=1e-12, token_type_ids=None) -> Tensor:
    types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids
    total = word[ids] + token_type[types] + position[: ids.shape[-1]]
    return F.layer_norm(total, word.shape[1:], weight, bias, eps)


def conv2d_bn_act(
    x,
    weight,
    bias,
    running_mean,
    running_var,
    bn_weight,
    bn_bias,
    activation,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    eps=1e-5,
) -> Tensor:
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    batched = y if x.dim() == 4 else y.unsqueeze(0)
    normalised = F.batch_norm(batched, running_mean, running_var, bn_weight, bn_bias, eps=eps)
    return activations.apply_activation(normalised.view_as(y), activation)


def conv2d_gelu_dropout(x, weight, bias, p, training=True, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
    return F.dropout(F.gelu(F.conv2d(x, weight, bias, stride, padding, dilation, groups)), p, training)


def depthwise_pointwise(
    x, depthwise_weight, depthwise_bias, pointwise_weight, pointwise_bias, activation, stride=1, padding=0, dilation=1
) -> Tensor:
    y = F.conv2d(x, depthwise_weight, depthwise_bias, stride, padding, dilation, x.shape[-3])
    return activations.apply_activation(F.conv2d(y, pointwise_weight, pointwise_bias), activation)
