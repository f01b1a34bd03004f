import copy

import pytest
import torch
from accuracy import check_strategies
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter
from kfconvert.modules import FusedLinear, FusedSelfAttention

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def attention(batch_first=True, bias=True, **options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first, **options).eval()


def fused(original):
    linear = nn.Linear(32, 96, bias=original.in_proj_bias is not None)
    linear.weight, linear.bias = original.in_proj_weight, original.in_proj_bias
    return FusedSelfAttention(linear, original.out_proj, original.num_heads, original.batch_first).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_every_strategy_is_as_accurate_as_the_composition(batch_first, dtype, device):
    module = fused(attention(batch_first, device=device, dtype=dtype))
    check_strategies(module, torch.randn(3, 11, 32, device=device, dtype=dtype))


@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 1, 32), (1, 20, 32), (0, 5, 32)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_input_shapes(shape, bias, device):
    check_strategies(fused(attention(bias=bias, device=device)), torch.randn(shape, device=device))


@pytest.mark.parametrize("batch_first", [True, False])
def test_it_is_the_module_of_torch(batch_first, device):
    original = attention(batch_first, device=device)
    module, x = fused(original), torch.randn(3, 11, 32, device=device)
    with torch.no_grad():
        expected = original(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(module(x), expected)
        original.in_proj_weight.mul_(2)
        torch.testing.assert_close(module(x), original(x, x, x, need_weights=False)[0])
        torch.testing.assert_close(copy.deepcopy(module)(x), module(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FusedSelfAttention(nn.Linear(8, 24), nn.Linear(8, 8), 3), "3 heads"),
        (lambda: FusedSelfAttention(nn.Linear(8, 16), nn.Linear(8, 8), 2), "16 features"),
        (lambda: FusedSelfAttention(FusedLinear(8, 24, activation="relu"), nn.Linear(8, 8), 2), "ends in 'relu'"),
    ],
)
def test_errors_are_one_clear_line(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("batch_first", [True, *exhaustive(False)])
@torch.no_grad()
def test_encoder_layers_of_torch(batch_first):
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first).eval()
    converter = ModelConverter(select="all")
    converted = converter.convert_model(model, example_inputs=torch.randn(3, 5, 32))
    assert converter.conversion_stats["self_attention_replaced"] == 1
    # Attention may draw random numbers; without a dropout nothing of the original is to stay.
    program = converted.__dict__["forward"].variants[0].program
    assert not {"scaled_dot_product_attention", "unflatten"} & set(program.code.__code__.co_varnames)
    for shape in ((3, 5, 32), (2, 5, 32), (1, 5, 32)):  # the first dimension is free
        x = torch.randn(shape)
        y = converted(x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
        assert y.stride() == model(x).stride()
    assert converted.kfconvert_info()["guard"] == {"hits": 3, "misses": {}}
