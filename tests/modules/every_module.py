"""One small module of each kind, with the shapes of its inputs."""

import torch
from torch import nn

from kfconvert import modules

MODULES = {
    "linear": (lambda: modules.FusedLinear(8, 6, activation="silu"), [(20, 8)]),
    "linear_scale": (
        lambda: modules.FusedLinearScale.from_tensors(torch.randn(6, 8), torch.randn(6), torch.randn(6)),
        [(20, 8)],
    ),
    "merged": (lambda: modules.FusedMergedLinear(nn.Linear(8, 6), nn.Linear(8, 4)), [(20, 8)]),
    "gated": (lambda: modules.FusedGatedLinear(nn.Linear(8, 6), nn.Linear(8, 6)), [(20, 8)]),
    "conv": (
        lambda: modules.FusedConvBN(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), "relu").eval(),
        [(2, 4, 5, 5), (2, 6, 3, 3)],
    ),
    "conv_without_norm": (
        lambda: modules.FusedConvBN(nn.Conv2d(4, 6, 3), None, "silu").eval(),
        [(2, 4, 5, 5), (2, 6, 3, 3)],
    ),
    "batch_norm": (lambda: modules.FusedBatchNormAct(nn.BatchNorm2d(4), "relu").eval(), [(2, 4, 5, 5)]),
    "group_norm": (lambda: modules.FusedGroupNorm(nn.GroupNorm(2, 4), "silu"), [(2, 4, 5, 5)]),
    "layer_norm": (lambda: modules.FusedAddLayerNorm(8, activation="gelu", return_sum=True), [(5, 8), (5, 8)]),
    "rms_norm": (lambda: modules.FusedRMSNorm(8), [(5, 8)]),
    "rotary": (modules.FusedRotary, [(5, 8), (5, 8), (5, 8)]),
    "squeeze_excite": (
        lambda: modules.FusedSqueezeExcite(nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)),
        [(2, 4, 5, 5)],
    ),
}
