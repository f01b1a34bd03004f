import copy
import pickle

import pytest
import torch
from accuracy import check_cuda_graph, check_strategies, exact
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
        assert_as_accurate(module._skinny()(x), module.reference(x), exact(module, x), ulps=(2.0, 0.25))


@pytest.mark.parametrize("form", FORMS)
def test_strided_inputs(form, device):
    check_strategies(gated(form, device), torch.randn(5, 64, 7, device=device).transpose(1, 2))


def test_order_of_the_halves():
    linear, x = nn.Linear(64, 96), torch.randn(4, 64)
    first, second = linear(x).chunk(2, -1)
    gate_first, gate_last = (FusedGatedLinear.from_packed(linear, "relu", order) for order in (True, False))
    torch.testing.assert_close(gate_first(x), first.relu() * second)
    torch.testing.assert_close(gate_last(x), first * second.relu())


def test_a_layer_without_bias_beside_one_with(device):
    module = FusedGatedLinear(nn.Linear(64, 48, bias=False), nn.Linear(64, 48), "gelu").to(device)
    check_strategies(module, torch.randn(20, 64, device=device))


@pytest.mark.parametrize("form", FORMS)
def test_row_counts_may_vary(form, device):
    module = gated(form, device)
    with torch.no_grad():
        for strategy in module.strategies(torch.empty(32, 64, device=device)):
            module.strategy = strategy
            for rows in (32, 33, 33, 1, 0, 32):
                x = torch.randn(rows, 64, device=device)
                assert_as_accurate(module(x), module.reference(x), exact(module, x))


@pytest.mark.parametrize("form", FORMS)
def test_follows_its_parameters(form, device):
    module, x = gated(form, device), torch.randn(20, 64, device=device)
    for strategy in module.strategies(x):
        module.strategy = strategy
        for change in ("optimize", "load", "swap"):
            with torch.no_grad():
                before = module(x)
            if change == "optimize":
                module(x).square().sum().backward()
                torch.optim.SGD(module.parameters(), lr=1.0).step()
            elif change == "load":
                module.load_state_dict({n: torch.randn_like(t) for n, t in module.state_dict().items()})
            else:
                parameter = next(module.parameters())
                parameter.data = torch.randn_like(parameter)
            with torch.no_grad():
                assert not torch.equal(module(x), before)
                torch.testing.assert_close(module(x), module.reference(x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "quick_gelu"])
def test_gradcheck(form, activation, device):
    module = gated(form, device, torch.float64, activation)
    x = torch.randn(3, 64, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x, fast_mode=True)
    wanted = [x, *module.parameters()]
    got, want = (torch.autograd.grad(y.sin().sum(), wanted) for y in (module(x), module.reference(x)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinities(form, device):
    module, x = gated(form, device), torch.randn(40, 64, device=device)
    x[[1, 3, 5], [3, 2, 8]] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
    with torch.no_grad():
        truth = exact(module, x)
        for module.strategy in module.strategies(x):
            y = module(x)
            assert torch.equal(y.isnan(), truth.isnan()) and torch.equal(y.isfinite(), truth.isfinite())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(form, duplicate, device):
    module, x = gated(form, device), torch.randn(4, 64, device=device)
    with torch.no_grad():
        expected = module(x)
        copied = duplicate(module)
        torch.testing.assert_close(copied(x), expected)
        next(copied.parameters()).zero_()
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("form", FORMS)
def test_compile_and_autocast(form, device):
    module, x = gated(form, device), torch.randn(8, 64, device=device)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y, want = module(x), module.reference(x)
            assert y.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(y, want, rtol=2**-6, atol=1e-2)


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


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_cuda_graph(form):
    module, x = gated(form, "cuda", torch.float16), torch.randn(32, 64, device="cuda", dtype=torch.float16)
    check_cuda_graph(module, x)
