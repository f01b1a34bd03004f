import pytest
import torch
from accuracy import check_strategies
from support.operator_samples import DTYPES
from support.selection import each_once
from torch import nn

from kfconvert.modules import FusedGroupNorm


def build(activation="silu", device=None, dtype=None, affine=True):
    norm = nn.GroupNorm(4, 16, eps=1e-6, affine=affine, device=device, dtype=dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return FusedGroupNorm(norm, activation, 0.2).eval()


@each_once(activation=["none", "relu", "silu", "gelu", "leaky_relu"], dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    x = torch.randn(2, 16, 9, 8, device=device, dtype=dtype)
    assert "kernel" in check_strategies(build(activation, device, dtype), x)
    check_strategies(build(activation, device, dtype, affine=False), x)


def test_channels_last_stays(device):
    module = build(device=device).requires_grad_(False)
    x = torch.randn(2, 16, 9, 8, device=device).contiguous(memory_format=torch.channels_last)
    assert check_strategies(module, x) == ["kernel"] * (x.device.type == "cuda") + ["composition"]
    assert module(x).stride() == x.stride()


def test_what_is_refused():
    with pytest.raises(TypeError, match="expected an nn.GroupNorm"):
        FusedGroupNorm(nn.BatchNorm2d(4))
