import copy

import pytest
import torch
from accuracy import check_strategies
from support.selection import each_once
from torch import nn

from kfconvert.modules import FusedBatchNormAct
from kfconvert.ops import ACTIVATIONS

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def build(dims=2, activation="relu", channels=12, device=None, dtype=None, **options):
    norm = NORMS[dims](channels, device=device, dtype=dtype, **options)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return FusedBatchNormAct(norm, activation, 0.2).eval()


@each_once(activation=ACTIVATIONS, dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    module = build(activation=activation, device=device, dtype=dtype)
    names = check_strategies(module, torch.randn(2, 12, 9, 7, device=device, dtype=dtype) * 3)
    assert "kernel" in names


@pytest.mark.parametrize(("dims", "shape"), [(1, (5, 12)), (1, (2, 12, 9)), (2, (2, 12, 0, 3)), (3, (2, 12, 3, 4, 5))])
def test_dimensions(dims, shape, device):
    check_strategies(build(dims, device=device), torch.randn(shape, device=device))
    check_strategies(build(dims, device=device, affine=False, eps=1e-3), torch.randn(shape, device=device))


def test_memory_format_is_kept(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device).contiguous(memory_format=torch.channels_last)
    check_strategies(module, x)
    with torch.no_grad():
        for module.strategy in module.strategies(x):
            assert module(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "shape, order", [((3, 6, 5), (0, 2, 1)), ((3, 6, 4, 5), (0, 3, 2, 1)), ((3, 5, 6, 4), (0, 1, 3, 2))], ids=str
)
def test_other_strides_become_contiguous_as_in_aten(shape, order, device):
    x = torch.randn(shape, device=device).permute(order)
    norm = (nn.BatchNorm1d if x.dim() == 3 else nn.BatchNorm2d)(5, device=device).eval()
    fused = FusedBatchNormAct(norm, "relu").eval()
    with torch.no_grad():
        want = norm(x).relu()
        for fused.strategy in fused.strategies(x):
            torch.testing.assert_close(fused(x), want)
            assert fused(x).stride() == want.stride()


def test_training_uses_and_updates_the_statistics_of_the_batch(device):
    module = build(device=device).train()
    norm = copy.deepcopy(module.bn)
    x = torch.randn(4, 12, 5, 7, device=device)
    torch.testing.assert_close(module(x), norm(x).relu())
    torch.testing.assert_close(module.bn.running_var, norm.running_var)
    with pytest.raises(ValueError, match="statistics of the batch"):
        module.plan(x)


def test_float_norm_of_half_inputs_has_no_kernel(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device).bfloat16()
    assert module.strategies(x) == ["composition"]


def test_what_is_refused():
    with pytest.raises(TypeError, match="expected an nn.BatchNorm"):
        FusedBatchNormAct(nn.GroupNorm(2, 4))
    with pytest.raises(TypeError, match="not initialized"):
        FusedBatchNormAct(nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="unknown activation"):
        FusedBatchNormAct(nn.BatchNorm2d(4), "swish")
