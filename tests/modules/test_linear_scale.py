import copy

import pytest
import torch
from accuracy import check_strategies
from torch import nn

from kfconvert.modules import FusedLinearScale

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def build(device=None, dtype=None, bias=True, transposed=False, permutation=None, shape=(32,), spread=1.0):
    linear = nn.Linear(48, 32, bias, device=device, dtype=dtype)
    weight = nn.Parameter(linear.weight.detach().t().contiguous()) if transposed else linear.weight
    gamma = nn.Parameter((torch.rand(shape, device=device) * spread + 0.01).to(dtype or torch.float32))
    return FusedLinearScale.from_tensors(weight, linear.bias, gamma, transposed, permutation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [dict(), dict(bias=False), dict(transposed=True), dict(shape=(32, 1, 1), permutation=(0, 2, 1))], ids=str
)
@pytest.mark.parametrize("rows", [3, 40])
def test_every_strategy_is_as_accurate_as_the_composition(dtype, options, rows, device):
    module = build(device, dtype, **options)
    names = check_strategies(module, torch.randn(2, rows, 48, device=device, dtype=dtype))
    assert "folded" in names


def test_is_the_product_with_gamma(device):
    module = build(device, shape=(32, 1, 1), permutation=(0, 3, 1, 2))
    x = torch.randn(2, 5, 7, 48, device=device)
    want = nn.functional.linear(x, module.weight, module.bias).permute(0, 3, 1, 2) * module.gamma
    with torch.no_grad():
        for module.strategy in module.strategies(x):
            torch.testing.assert_close(module(x), want)
            assert module(x).is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("weight", "gamma", "inputs"), [(0.2, 1e-5, 3e3), (10, 1e4, 1e-3)], ids=["too small", "too large"]
)
def test_folded_weights_beyond_the_range_of_float16(weight, gamma, inputs, transposed, device):
    """Tensors that come later, and the result, lie within it; what is folded does not."""
    module, x = build(device, torch.float16, transposed=transposed), torch.randn(40, 48, device=device).half()
    names = module.strategies(x)
    for module.strategy in names:
        module(x)
    module.weight.normal_().mul_(weight), module.bias.zero_(), module.gamma.fill_(gamma)
    x *= inputs
    exact = copy.deepcopy(module).double().reference(x.double())
    for module.strategy in names:
        error = (module(x).double() - exact).abs().max()
        assert error <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()


def test_what_is_refused():
    linear = nn.Linear(8, 6)
    for shape in ((8,), (2, 3), (1,)):
        with pytest.raises(ValueError, match="gamma must have 6 elements"):
            FusedLinearScale.from_tensors(linear.weight, linear.bias, torch.ones(shape))
    with pytest.raises(TypeError, match="gamma has dtype"):
        FusedLinearScale.from_tensors(linear.weight, linear.bias, torch.ones(6, dtype=torch.int64))
