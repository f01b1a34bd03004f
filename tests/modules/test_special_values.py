"""NaN and infinities come out of every strategy at the places where ATen has them."""

import torch
from accuracy import check_special_values
from support.selection import each_once, pairwise
from torch import nn

from kfconvert.modules import FusedAddLayerNorm, FusedAddRMSNorm, FusedConvBN, FusedLayerNorm, FusedLinear, FusedRMSNorm
from kfconvert.ops import ACTIVATIONS

SPECIAL = [float("nan"), float("inf"), -float("inf")]
NORM_ACTIVATIONS = [name for name in ACTIVATIONS if name != "leaky_relu"]
CONVOLUTIONS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}


def convolution(dims, activation, device, channels=(12, 16), slope=0.2, **options):
    conv, norm = CONVOLUTIONS[dims]
    bn = norm(channels[1])
    for tensor in (bn.weight.data, bn.bias.data, bn.running_mean):
        tensor.normal_()
    return FusedConvBN(conv(*channels, **options), bn, activation, slope).eval().to(device)


def expected_strategies(module, x):
    if x.is_cuda:
        return ["cudnn"] if module.activation == "relu" and x.dim() in (4, 5) else []
    return ["onednn"] if x.dim() in (4, 5) and torch.backends.mkldnn.is_available() else []


@each_once(kind=[(1, False), (2, False), (2, True), (3, False), (3, True)], activation=ACTIVATIONS)
def test_convolution(activation, kind, device):
    dims, channels_last = kind
    for options in (dict(kernel_size=3, padding=1), dict(kernel_size=1), dict(kernel_size=3, stride=2, groups=4)):
        module = convolution(dims, activation, device, **options)
        module.channels_last = channels_last
        x = torch.randn(3, 12, *[9] * dims, device=device)
        with torch.no_grad():
            residual = torch.randn_like(module.reference(x))
        for i, value in enumerate(SPECIAL):
            x[i, 3][(2,) * dims] = value
        expected = expected_strategies(module, x)
        check_special_values(module, x, expected=expected)
        check_special_values(module, x, residual, expected=expected)
        # In reach of the infinities of x, and out of it.
        for i, value in enumerate(SPECIAL):
            residual[i, 2][(1,) * dims] = value
            residual[i, 7][(3,) * dims] = SPECIAL[2 - i]
        check_special_values(module, x, residual, expected=expected)


@each_once(activation=ACTIVATIONS, bias=[False, True])
def test_linear(activation, bias, device):
    module = FusedLinear(64, 32, bias, activation, 0.2, device=device)
    packed = ["onednn"] if device.type == "cpu" and torch.backends.mkldnn.is_available() else []
    for rows, expected in ((40, packed), (7, [])):
        x = torch.randn(rows, 64, device=device)
        x[[1, 3, 5], [3, 2, 8]] = torch.tensor(SPECIAL, device=device)
        check_special_values(module, x, expected=expected)


@pairwise(
    activation=NORM_ACTIVATIONS,
    shape=[96, 1000],
    kinds=[(FusedLayerNorm, FusedAddLayerNorm), (FusedRMSNorm, FusedAddRMSNorm)],
)
def test_norm(activation, shape, kinds, device):
    norm, add_norm = kinds
    x, residual = torch.randn(2, 9, shape, device=device)
    x[[1, 3, 5], [3, 2, 8]] = torch.tensor(SPECIAL, device=device)
    check_special_values(norm(shape, activation=activation, device=device), x)
    residual[[1, 5, 7], [3, 8, 4]] = torch.tensor(SPECIAL, device=device)
    check_special_values(add_norm(shape, activation=activation, device=device), x, residual)
