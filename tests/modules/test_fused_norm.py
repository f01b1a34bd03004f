import pytest
import torch
from accuracy import check_strategies
from support.selection import each_once
from torch import nn

from kfconvert.modules import (
    FusedAddLayerNorm,
    FusedLayerNorm,
    FusedLayerNormGELU,
    FusedLayerNormReLU,
    FusedLayerNormSiLU,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@each_once(activation=["none", "relu", "gelu", "gelu_tanh", "silu"], dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    module = randomise(FusedLayerNorm(96, activation=activation, device=device, dtype=dtype))
    check_strategies(module, torch.randn(5, 7, 96, device=device, dtype=dtype) * 3 + 1)
    module = randomise(FusedAddLayerNorm(96, activation=activation, device=device, dtype=dtype))
    x, residual = torch.randn(2, 5, 7, 96, device=device, dtype=dtype)
    check_strategies(module, x, residual)


@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("shape", [(96,), (4, 6)], ids=str)
def test_affine_and_shapes(affine, bias, shape, device):
    module = randomise(FusedLayerNorm(shape, elementwise_affine=affine, bias=bias, activation="relu", device=device))
    check_strategies(module, torch.randn(3, *shape, device=device))
    check_strategies(module, torch.randn(0, *shape, device=device))
    check_strategies(module, torch.randn(*shape, 3, device=device).movedim(-1, 0))


def test_from_tensors_shares(device):
    norm = randomise(nn.LayerNorm(64, eps=1e-3, bias=False, device=device))
    x, residual = torch.randn(2, 5, 64, device=device)
    module = FusedLayerNorm.from_tensors(64, norm.weight, None, 1e-3, "gelu")
    assert module.weight is norm.weight and module.bias is None
    torch.testing.assert_close(module(x), nn.functional.gelu(norm(x)))
    added = FusedAddLayerNorm.from_tensors(64, norm.weight, None, 1e-3, return_sum=True)
    torch.testing.assert_close(added(x, residual), (norm(x + residual), x + residual))


def test_named_classes(device):
    x = torch.randn(5, 64, device=device)
    for module, function in (
        (FusedLayerNormReLU(64, device=device), torch.relu),
        (FusedLayerNormGELU(64, device=device), nn.functional.gelu),
        (FusedLayerNormGELU(64, approximate="tanh", device=device), nn.GELU("tanh")),
        (FusedLayerNormSiLU(64, device=device), nn.functional.silu),
    ):
        torch.testing.assert_close(module(x), function(nn.functional.layer_norm(x, (64,))))
    shared = FusedLayerNormReLU.from_tensors(64, torch.ones(64, device=device), None)
    assert type(shared) is FusedLayerNormReLU and shared.activation == "relu"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FusedLayerNorm(4, activation="mish"), ValueError, "unknown activation 'mish'"),
        (lambda: FusedLayerNormGELU(4, approximate="x"), ValueError, "approximate"),
        (lambda: FusedLayerNorm.from_tensors(4, torch.ones(5), None), ValueError, "weight must have shape"),
        (lambda: FusedLayerNorm.from_tensors(4, torch.ones(4, dtype=torch.int32), None), TypeError, "torch.int32"),
    ],
)
def test_errors_are_one_clear_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
