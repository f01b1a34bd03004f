"""Depthwise convolutions: kfconvert's kernels on CUDA are as accurate as the composition for each size and layout."""

import pytest
import torch
from accuracy import check_cuda_graph, check_special_values, check_strategies
from support.selection import pairwise
from torch import nn

from kfconvert.modules import FusedConvBN
from kfconvert.ops import ACTIVATIONS

pytestmark = pytest.mark.cuda  # elsewhere a depthwise convolution is as any other

# (kernel, stride) of both kernels.
KINDS = [(7, 1), (5, 1), (3, 1), (3, 2), (5, 2)]
# Batch, channels, height, width: one slot or tile and less, several images in a block, blocks for large batches, and
# channels that do not fill the last block.
SHAPES = [
    (2, 8, 9, 9), (1, 24, 7, 7), (3, 16, 14, 14), (20, 40, 7, 7), (5, 24, 30, 23), (2, 16, 3, 120), (17, 8, 1, 2),
    (2, 32, 56, 56), (33, 136, 14, 15), (40, 64, 28, 28),
]  # fmt: skip


def depthwise(channels, kernel, stride, activation, dtype, **options):
    options = {"padding": kernel // 2, "groups": channels, "stride": stride, **options}
    conv = nn.Conv2d(channels, channels, kernel, device="cuda", dtype=dtype, **options)
    module = FusedConvBN(conv, None, activation, 0.2).eval()
    module.channels_last = True
    return module


@pairwise(shape=SHAPES, kind=KINDS, activation=ACTIVATIONS, dtype=[torch.float16, torch.bfloat16])
def test_sizes(shape, kind, activation, dtype):
    module = depthwise(shape[1], *kind, activation, dtype, bias=shape[0] % 2 == 0)
    names = check_strategies(module, torch.randn(shape, device="cuda", dtype=dtype))
    assert "depthwise" in names


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("padding", [0, (1, 3), "reflect"], ids=str)
def test_padding(kind, padding):
    options = dict(padding=2, padding_mode="reflect") if padding == "reflect" else dict(padding=padding)
    module = depthwise(16, *kind, "relu", torch.float16, **options)
    check_strategies(module, torch.randn(3, 16, 17, 20, device="cuda", dtype=torch.float16))


def test_with_batch_norm():
    module = depthwise(24, 5, 1, "hardswish", torch.float16, bias=False)
    module.bn = nn.BatchNorm2d(24, device="cuda", dtype=torch.float16).eval()
    for tensor in (module.bn.weight.data, module.bn.bias.data, module.bn.running_mean):
        tensor.normal_()
    check_strategies(module, torch.randn(2, 24, 14, 14, device="cuda", dtype=torch.float16))


@pytest.mark.parametrize(
    ("channels", "options"),
    [(12, {}), (16, dict(dilation=2)), (16, dict(stride=3)), (16, dict(stride=(1, 2))), (16, dict(groups=8))],
    ids=str,
)
def test_without_a_kernel(channels, options):
    options = {"stride": 1, **options}
    module = depthwise(channels, 3, activation="none", dtype=torch.float16, **options)
    x = torch.randn(2, channels, 9, 9, device="cuda", dtype=torch.float16)
    assert "depthwise" not in check_strategies(module, x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_stay_in_the_window(kind, value):
    module = depthwise(16, *kind, "none", torch.float16)
    x = torch.randn(2, 16, 20, 22, device="cuda", dtype=torch.float16)
    x[0, 3, 9, 10] = x[1, 5, 0, 21] = value
    x[1, 7, 2, 3] = float("nan")
    check_special_values(module, x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_plan_serves_other_sizes_and_layouts(kind):
    module = depthwise(16, *kind, "silu", torch.float16)
    x = torch.randn(2, 16, 14, 14, device="cuda", dtype=torch.float16)
    plan = module.plan(x)
    with torch.no_grad():
        for other in (x[:, :, :9], x[:1], x[:0], x.contiguous(memory_format=torch.channels_last)[..., 1:], x[..., ::2]):
            torch.testing.assert_close(plan(other), module.reference(other), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_in_a_cuda_graph(kind):
    module = depthwise(16, *kind, "silu", torch.float16)
    check_cuda_graph(module, torch.randn(2, 16, 14, 14, device="cuda", dtype=torch.float16))
