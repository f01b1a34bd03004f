import pytest
import torch
from accuracy import check_strategies
from torch import nn

from kfconvert.modules import FusedSqueezeExcite

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def build(activation="relu", gate="sigmoid", device=None, dtype=None, bias=True):
    options = dict(bias=bias, device=device, dtype=dtype)
    convs = nn.Conv2d(24, 6, 1, **options), nn.Conv2d(6, 24, 1, **options)
    return FusedSqueezeExcite(*convs, activation, gate).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "gate"),
    [("relu", "sigmoid"), ("relu", "hardsigmoid"), ("silu", "sigmoid"), ("hardswish", "hardsigmoid")],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_every_strategy_is_as_accurate_as_the_composition(activation, gate, dtype, memory_format, device):
    x = torch.randn(3, 24, 7, 9, device=device, dtype=dtype).contiguous(memory_format=memory_format)
    module = build(activation, gate, device, dtype)
    assert "kernel" in check_strategies(module, x)
    check_strategies(build(activation, gate, device, dtype, bias=False), x)
    with torch.no_grad():
        assert module(x).is_contiguous(memory_format=memory_format)


def test_what_is_refused():
    squeeze, excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
    for convs in (
        (nn.Conv2d(8, 4, 3), excite),
        (nn.Conv2d(8, 4, 1, padding=1), excite),
        (nn.Conv2d(8, 4, 1, groups=2), excite),
    ):
        with pytest.raises(ValueError, match="expected a 1x1 convolution"):
            FusedSqueezeExcite(*convs)
    with pytest.raises(ValueError, match="the channels of .* do not match"):
        FusedSqueezeExcite(squeeze, nn.Conv2d(4, 6, 1))
    with pytest.raises(TypeError, match="expected an nn.Conv2d"):
        FusedSqueezeExcite(nn.Linear(8, 4), excite)
    with pytest.raises(ValueError, match="unknown activation"):
        FusedSqueezeExcite(squeeze, excite, gate="swish")
