import copy
import pickle

import pytest
import torch
from accuracy import check_cuda_graph, exact
from support.accuracy import assert_as_accurate
from torch import nn

from kfconvert.modules import FusedLinear, FusedMergedLinear

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def merged(device, dtype=torch.float32, biases=(True, True, True), sizes=(48, 16, 32)):
    linears = [nn.Linear(64, n, bias=b, device=device, dtype=dtype) for n, b in zip(sizes, biases, strict=True)]
    return FusedMergedLinear(*linears)


def check(module, x, strategies=None):
    with torch.no_grad():
        truth, composition = exact(module, x), module.reference(x)
        for module.strategy in strategies or [*module.strategies(x), None]:
            for _ in range(2):
                results = module(x)
                assert isinstance(results, tuple) and len(results) == len(truth)
                for got, aten, wide in zip(results, composition, truth, strict=True):
                    assert_as_accurate(got, aten, wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", [(True,) * 3, (False,) * 3, (True, False, True)], ids=str)
def test_every_strategy_is_as_accurate_as_the_composition(biases, dtype, device):
    check(merged(device, dtype, biases), torch.randn(3, 11, 64, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_few_rows(dtype, device):
    module, x = merged(device, dtype, (True, False, True)), torch.randn(3, 64, device=device, dtype=dtype)
    assert ("skinny" in module.strategies(x)) == (device.type == "cuda")
    check(module, x)
    with torch.no_grad():  # whatever the device offers
        for got, aten, wide in zip(module.product().skinny(x), module.reference(x), exact(module, x), strict=True):
            assert_as_accurate(got, aten, wide)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 5, 64)], ids=str)
def test_input_shapes(shape, device):
    check(merged(device), torch.randn(shape, device=device))


def test_strided_inputs_and_hugging_face_layers(device):
    check(merged(device), torch.randn(5, 64, 7, device=device).transpose(1, 2))
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 64).to(device)
    module = FusedMergedLinear(conv1d, nn.Linear(64, 16, device=device))
    check(module, torch.randn(4, 64, device=device))


def test_results_can_be_viewed_as_heads(device):
    module, x = merged(device, sizes=(64, 32, 32)), torch.randn(2, 5, 64, device=device)
    module.strategy = "merged"
    with torch.no_grad():
        query, key, value = (y.view(2, 5, -1, 16).transpose(1, 2) for y in module(x))
        wanted = [y.view(2, 5, -1, 16).transpose(1, 2) for y in module.reference(x)]
        got = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        torch.testing.assert_close(got, nn.functional.scaled_dot_product_attention(*wanted, enable_gqa=True))


@pytest.mark.parametrize("change", ["optimize", "load", "replace", "swap"])
def test_follows_its_parameters(change, device):
    module, x = merged(device), torch.randn(20, 64, device=device)
    for strategy in module.strategies(x):
        module.strategy = strategy
        with torch.no_grad():
            before = module(x)[1]
        linear = module.linears[1]
        if change == "optimize":
            module(x)[1].square().sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        elif change == "load":
            module.load_state_dict({name: torch.randn_like(t) for name, t in module.state_dict().items()})
        elif change == "replace":
            linear.weight = nn.Parameter(torch.randn_like(linear.weight))
        else:
            linear.bias.data = torch.randn_like(linear.bias)
        assert not torch.equal(module(x)[1], before)
        check(module, x, [strategy])


def test_places_are_those_of_strategies_that_copy_weights():
    module = merged("cpu")
    for strategy, count in (("merged", 6), ("mkl", 3), ("composition", 0), (None, 6)):
        module.strategy = strategy
        assert len(module.places()) == count


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


def test_gradients_are_those_of_the_layers(device):
    module, x = merged(device), torch.randn(4, 64, device=device, requires_grad=True)
    wanted = [x, *module.parameters()]
    got, want = (
        torch.autograd.grad(sum(y.sin().sum() for y in results), wanted) for results in (module(x), module.reference(x))
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(duplicate, device):
    module, x = merged(device), torch.randn(4, 64, device=device)
    module.strategy = "merged"
    with torch.no_grad():
        expected = module(x)
        copied = duplicate(module)
        assert copied.strategy == "merged"
        torch.testing.assert_close(copied(x), expected)
        copied.linears[0].weight.zero_()
        torch.testing.assert_close(module(x), expected)


def test_shares_parameters():
    linears = nn.Linear(8, 4), nn.Linear(8, 6)
    module = FusedMergedLinear(*linears)
    assert [p is q for p, q in zip(module.parameters(), [*linears[0].parameters(), *linears[1].parameters()])] == [
        True
    ] * 4


def test_compile_and_autocast(device):
    module, x = merged(device), torch.randn(8, 64, device=device)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert all(y.dtype == torch.bfloat16 for y in module(x))


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


@pytest.mark.cuda
def test_cuda_graph():
    module, x = merged("cuda", torch.float16), torch.randn(32, 64, device="cuda", dtype=torch.float16)
    check_cuda_graph(module, x)
