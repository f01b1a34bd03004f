import pytest
import torch
from accuracy import check_strategies, exact
from support.accuracy import assert_as_accurate
from torch import nn

from kfconvert.modules import FusedLinear, FusedMergedLinear

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def merged(device, dtype=torch.float32, biases=(True, True, True), sizes=(48, 16, 32)):
    linears = [nn.Linear(64, n, bias=b, device=device, dtype=dtype) for n, b in zip(sizes, biases, strict=True)]
    return FusedMergedLinear(*linears)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", [(True,) * 3, (False,) * 3, (True, False, True)], ids=str)
def test_every_strategy_is_as_accurate_as_the_composition(biases, dtype, device):
    check_strategies(merged(device, dtype, biases), torch.randn(3, 33, 64, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_rows(dtype, device):
    module, x = merged(device, dtype, (True, False, True)), torch.randn(3, 64, device=device, dtype=dtype)
    assert ("skinny" in module.strategies(x)) == (device.type == "cuda")
    check_strategies(module, x)
    with torch.no_grad():  # whatever the device offers
        for got, aten, wide in zip(module.few_rows().run(x), module.reference(x), exact(module, x), strict=True):
            assert_as_accurate(got, aten, wide)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 5, 64)], ids=str)
def test_input_shapes(shape, device):
    check_strategies(merged(device), torch.randn(shape, device=device))


def test_strided_inputs_and_hugging_face_layers(device):
    check_strategies(merged(device), torch.randn(5, 64, 7, device=device).transpose(1, 2))
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 64).to(device)
    module = FusedMergedLinear(conv1d, nn.Linear(64, 16, device=device))
    check_strategies(module, torch.randn(4, 64, device=device))


def test_one_concatenated_weight_for_all_plans_that_lives_as_long_as_they(device):
    module, x = merged(device), torch.randn(4, 64, device=device)
    module.strategy = "merged"
    with torch.no_grad():
        plans = [module.plan(x), module.plan(x[:2])]
        assert plans[0].weight is plans[1].weight
        before = plans[0](x)
        module.linears[0].weight.add_(1)
        assert module.plan(x).weight is not plans[0].weight
        kept = module.plan(x)
        assert not torch.equal(kept(x)[0], before[0])
        module.clear_derived()
        assert module.plan(x).weight is not kept.weight
        few = [module.few_rows() for _ in range(2)]
        assert few[0].weights[0] is few[1].weights[0]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FusedMergedLinear(nn.Linear(4, 4)), ValueError, "two linear layers or more"),
        (lambda: FusedMergedLinear(nn.Linear(4, 4), nn.Linear(5, 4)), ValueError, "differ in input size"),
        (lambda: FusedMergedLinear(nn.Linear(4, 4), nn.Linear(4, 4).half()), ValueError, "differ in input size, dtype"),
        (
            lambda: FusedMergedLinear(nn.Linear(4, 4), FusedLinear(4, 4, activation="relu")),
            ValueError,
            "ends in 'relu'",
        ),
        (lambda: FusedMergedLinear(nn.Linear(4, 4), nn.Conv2d(4, 4, 1)), TypeError, "expected an nn.Linear"),
    ],
)
def test_errors_are_one_clear_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
