import pytest
import torch
from accuracy import check_strategies, exact
from support.accuracy import assert_as_accurate
from support.selection import pairwise
from torch import nn

from kfconvert.modules import FusedGatedLinear, FusedLinear
from kfconvert.ops import ACTIVATIONS

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FORMS = ["two", "gate_first", "gate_last"]


def gated(form, device, dtype=torch.float32, activation="silu", bias=True):
    options = {"bias": bias, "device": device, "dtype": dtype}
    if form == "two":
        return FusedGatedLinear(nn.Linear(64, 48, **options), nn.Linear(64, 48, **options), activation, 0.2)
    return FusedGatedLinear.from_packed(nn.Linear(64, 96, **options), activation, form == "gate_first", 0.2)


@pairwise(dtype=DTYPES, activation=ACTIVATIONS, form=FORMS)
def test_every_strategy_is_as_accurate_as_the_composition(form, activation, dtype, device):
    module = gated(form, device, dtype, activation)
    names = check_strategies(module, torch.randn(3, 11, 64, device=device, dtype=dtype))
    assert ("merged" in names) == (form == "two")


@pairwise(shape=[(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 5, 64)], bias=[True, False], form=FORMS)
def test_input_shapes(form, shape, bias, device):
    check_strategies(gated(form, device, bias=bias), torch.randn(shape, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_few_rows(form, dtype, device):
    module = gated(form, device, dtype)
    x = torch.randn(3, 64, device=device, dtype=dtype)
    assert ("skinny" in check_strategies(module, x)) == (device.type == "cuda")
    with torch.no_grad():  # whatever the device offers
        assert_as_accurate(module.few_rows().run(x), module.reference(x), exact(module, x), ulps=(2.0, 0.25))


def test_order_of_the_halves():
    linear, x = nn.Linear(64, 96), torch.randn(4, 64)
    first, second = linear(x).chunk(2, -1)
    gate_first, gate_last = (FusedGatedLinear.from_packed(linear, "relu", order) for order in (True, False))
    torch.testing.assert_close(gate_first(x), first.relu() * second)
    torch.testing.assert_close(gate_last(x), first * second.relu())


def test_a_layer_without_bias_beside_one_with(device):
    module = FusedGatedLinear(nn.Linear(64, 48, bias=False), nn.Linear(64, 48), "gelu").to(device)
    check_strategies(module, torch.randn(20, 64, device=device))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FusedGatedLinear(nn.Linear(4, 4), nn.Linear(4, 5)), "gate and up have 4 and 5 features"),
        (lambda: FusedGatedLinear(nn.Linear(4, 4), nn.Linear(4, 4), "mish"), "unknown activation 'mish'"),
        (lambda: FusedGatedLinear.from_packed(nn.Linear(4, 5)), "an even number of features, got 5"),
        (lambda: FusedGatedLinear.from_packed(FusedLinear(4, 4, activation="relu")), "ends in 'relu'"),
    ],
)
def test_errors_are_one_clear_line(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
