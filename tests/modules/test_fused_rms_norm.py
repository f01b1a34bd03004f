import pytest
import torch
from accuracy import check_strategies
from support.selection import pairwise
from torch import nn

from kfconvert.modules import FusedAddRMSNorm, FusedRMSNorm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pairwise(dtype=DTYPES, offset=[0.0, 1.0], activation=["none", "relu", "gelu", "silu"])
def test_every_strategy_is_as_accurate_as_the_composition(activation, offset, dtype, device):
    options = {"activation": activation, "offset": offset, "device": device, "dtype": dtype}
    module = randomise(FusedRMSNorm(96, **options))
    check_strategies(module, torch.randn(5, 7, 96, device=device, dtype=dtype) * 3 + 1)
    module = randomise(FusedAddRMSNorm(96, **options))
    x, residual = torch.randn(2, 5, 7, 96, device=device, dtype=dtype)
    check_strategies(module, x, residual)
    check_strategies(module, x, residual[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_weight_beside_a_half_type(dtype, device):
    module = randomise(FusedRMSNorm(96, offset=1.0, device=device))
    check_strategies(module, torch.randn(5, 7, 96, device=device, dtype=dtype))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(96,), (4, 6)], ids=str)
def test_affine_and_shapes(affine, shape, device):
    module = randomise(FusedRMSNorm(shape, elementwise_affine=affine, activation="relu", device=device))
    check_strategies(module, torch.randn(3, *shape, device=device))
    check_strategies(module, torch.randn(0, *shape, device=device))
    check_strategies(module, torch.randn(*shape, 3, device=device).movedim(-1, 0))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_fresh_module_is_a_fresh_rms_norm(offset, device):
    x = torch.randn(5, 64, device=device)
    module = FusedRMSNorm(64, offset=offset, device=device)
    torch.testing.assert_close(module(x), nn.RMSNorm(64, eps=1e-6, device=device)(x))


def test_from_tensors_shares(device):
    norm = randomise(nn.RMSNorm(64, eps=1e-3, device=device))
    x, residual = torch.randn(2, 5, 64, device=device)
    module = FusedRMSNorm.from_tensors(64, norm.weight, norm.eps, "gelu")
    assert module.weight is norm.weight
    torch.testing.assert_close(module(x), nn.functional.gelu(norm(x)))
    added = FusedAddRMSNorm.from_tensors(64, norm.weight.detach(), norm.eps, return_sum=True)
    assert "weight" in dict(added.named_buffers())
    torch.testing.assert_close(added(x, residual), (norm(x + residual), x + residual))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FusedRMSNorm(4, activation="mish"), ValueError, "unknown activation 'mish'"),
        (lambda: FusedRMSNorm.from_tensors(4, torch.ones(5)), ValueError, "weight must have shape"),
        (lambda: FusedRMSNorm.from_tensors(4, torch.ones(4, dtype=torch.int32)), TypeError, "torch.int32"),
    ],
)
def test_errors_are_one_clear_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
