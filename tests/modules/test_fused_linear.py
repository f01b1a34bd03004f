import pytest
import torch
from accuracy import check_cuda_graph, check_strategies, exact
from support.accuracy import assert_as_accurate
from support.selection import each_once, pairwise
from torch import nn
from torch.nn.utils import parametrizations

from kfconvert.modules import (
    FusedLinear,
    FusedLinearGELU,
    FusedLinearReLU,
    FusedLinearSigmoid,
    FusedLinearSiLU,
    FusedLinearTanh,
)
from kfconvert.ops import ACTIVATIONS

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@each_once(activation=ACTIVATIONS, dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    module = FusedLinear(96, 160, activation=activation, negative_slope=0.2, device=device, dtype=dtype)
    check_strategies(module, torch.randn(3, 33, 96, device=device, dtype=dtype))


@pairwise(
    dtype=[torch.float16, torch.bfloat16],
    activation=["none", "relu", "gelu_tanh", "gelu"],
    bias=[True, False],
    shape=[(3, 11, 96), (96,), (0, 96)],
)
def test_rows_that_tensor_cores_cannot_write(activation, bias, shape, dtype, device):
    module = FusedLinear(96, 161, bias=bias, activation=activation, device=device, dtype=dtype)
    x = torch.randn(shape, device=device, dtype=dtype)
    check_strategies(module, x)
    with torch.no_grad():  # whatever the device offers
        for name in ("epilogue", "padded") if bias and activation in ("relu", "gelu_tanh") else ("padded",):
            y = module._plan(name, module.weight)(x)
            assert y.is_contiguous() and y.shape == (*shape[:-1], 161)
            assert_as_accurate(y, module.reference(x), exact(module, x))


@pytest.mark.cuda
def test_what_cuda_offers_for_half_types():
    x = torch.empty(4, 64, device="cuda", dtype=torch.float16)
    odd = FusedLinear(64, 33, activation="gelu_tanh", device="cuda", dtype=torch.float16)
    assert odd.strategies(x) == ["skinny", "kernel", "epilogue", "padded", "composition"]
    assert odd.strategies(x.repeat(5, 1)) == ["kernel", "epilogue", "padded", "composition"]
    assert FusedLinear(64, 32, device="cuda", dtype=torch.float16).strategies(x) == ["skinny", "kernel", "composition"]
    assert odd.float().strategies(x.float()) == ["kernel", "composition"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_one_triton_kernel(dtype):
    module = FusedLinear(1000, 1320, activation="gelu", device="cuda", dtype=dtype)
    x, wide = torch.randn(2, 1500, 1000, device="cuda", dtype=dtype), dtype == torch.float32
    assert ("triton" in check_strategies(module, x)) == (wide or torch.cuda.get_device_capability() >= (9, 0))
    check_cuda_graph(module, x)
    for few in (x[:, :3], *([] if wide else [x.flatten()[1:-999].view(-1, 1000)])):  # the other at an odd address
        assert torch.equal(module._triton(few), module._kernel(few))
    plain = FusedLinear(1000, 1320, device="cuda", dtype=dtype)
    turned = FusedLinear.from_tensors(module.weight.t().contiguous(), module.bias, "gelu", transposed=True)
    odd = FusedLinear(1000, 1321, activation="gelu", device="cuda", dtype=dtype)
    assert [("triton" in other.strategies(x)) for other in (plain, turned, odd)] == [wide] * 3
    assert "triton" not in module.strategies(x[0, :63]) and "triton" not in module.double().strategies(x.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_few_rows(transposed, dtype, device):
    linear = FusedLinear(96, 160, activation="gelu", device=device, dtype=dtype)
    weight = linear.weight.detach()
    module = FusedLinear.from_tensors(
        weight.t().contiguous() if transposed else weight, linear.bias.detach(), "gelu", transposed=transposed
    )
    names = check_strategies(module, torch.randn(1, 5, 96, device=device, dtype=dtype))
    assert ("skinny" in names) == (device.type == "cuda")
    with torch.no_grad():  # whatever the device offers
        x = torch.randn(2, 96, device=device, dtype=dtype)
        assert_as_accurate(module._skinny(x), module.reference(x), exact(module, x))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 5, 64)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_input_shapes(shape, bias, device):
    module = FusedLinear(64, 32, bias=bias, activation="relu", device=device)
    check_strategies(module, torch.randn(shape, device=device))


def test_row_counts_may_vary(device):
    module = FusedLinear(64, 32, activation="gelu", device=device)
    with torch.no_grad():
        for strategy in module.strategies(torch.empty(8, 64, device=device)):
            module.strategy = strategy
            for rows in (8, 9, 9, 9, 1, 8, 0, 33, 33):
                x = torch.randn(rows, 64, device=device)
                assert_as_accurate(module(x), module.reference(x), exact(module, x))


def test_packed_weights_are_offered_on_cpu(monkeypatch):
    module, x = FusedLinear(64, 32), torch.empty(128, 64)
    names = module.strategies(x)
    assert {"mkl", "onednn"} <= set(names) or not torch.backends.mkl.is_available()
    module.strategy = "cudnn"
    assert module.choose(x) == names[0]  # an unknown strategy stands for the first
    with torch.backends.mkldnn.flags(enabled=False):
        assert "onednn" not in module.strategies(x)
    monkeypatch.setattr("kfconvert.modules.linear.MKL_MIN_WEIGHT_BYTES", 2**20)
    assert "mkl" not in module.strategies(x)
    assert module.double().strategies(x.double()) == ["kernel", "composition"]


CHANGES = {
    "written": lambda module: module.bias.mul_(2),
    "replaced": lambda module: setattr(module, "bias", nn.Parameter(torch.randn_like(module.bias))),
    "of other data": lambda module: setattr(module.bias, "data", torch.randn_like(module.bias)),
    "removed": lambda module: setattr(module, "bias", None),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_plans_look_the_bias_up(change, activation, device):
    x = torch.randn(32, 64, device=device)
    for strategy in FusedLinear(64, 48, device=device).strategies(x):
        module = FusedLinear(64, 48, activation=activation, device=device)
        module.strategy = strategy
        plan, watched = module.plan(x), module.places()
        assert all(store is module._parameters and key == "weight" for store, key in watched)
        torch.testing.assert_close(plan(x), module.reference(x))
        CHANGES[change](module)
        torch.testing.assert_close(plan(x), module.reference(x))


def test_from_hugging_face_conv1d(device):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 64).to(device)
    module = FusedLinear.from_linear(conv1d, "gelu_tanh")
    assert module.weight is conv1d.weight and (module.in_features, module.out_features) == (64, 32)
    x = torch.randn(2, 40, 64, device=device)
    check_strategies(module, x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), nn.functional.gelu(conv1d(x), approximate="tanh"))


def test_named_classes(device):
    x = torch.randn(8, 64, device=device)
    for module, function in (
        (FusedLinearReLU(64, 32, device=device), torch.relu),
        (FusedLinearGELU(64, 32, device=device), nn.functional.gelu),
        (FusedLinearGELU(64, 32, approximate="tanh", device=device), nn.GELU("tanh")),
        (FusedLinearSiLU(64, 32, device=device), nn.functional.silu),
        (FusedLinearTanh(64, 32, device=device), torch.tanh),
        (FusedLinearSigmoid(64, 32, device=device), torch.sigmoid),
    ):
        with torch.no_grad():
            y = nn.functional.linear(x, module.weight, module.bias)
            torch.testing.assert_close(module(x), function(y))
        linear = nn.Linear(64, 32, device=device)
        assert type(module).from_linear(linear).activation == module.activation or "tanh" in module.activation
        assert f"activation={module.activation!r}" in repr(module)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FusedLinear(4, 4, activation="mish"), ValueError, "unknown activation 'mish'"),
        (lambda: FusedLinearGELU(4, 4, approximate="sigmoid"), ValueError, "approximate"),
        (lambda: FusedLinear.from_linear(nn.LazyLinear(4)), TypeError, "not initialized"),
        (lambda: FusedLinear.from_linear(nn.Conv2d(4, 4, 1)), TypeError, "expected an nn.Linear"),
        (lambda: FusedLinear.from_linear(parametrizations.weight_norm(nn.Linear(4, 4))), ValueError, "is parametrized"),
        (lambda: FusedLinear.from_linear(parametrizations.spectral_norm(nn.Linear(4, 4))), ValueError, "parametrized"),
        (lambda: FusedLinear.from_linear(type("Scaled", (nn.Linear,), {"forward": abs})(4, 4)), TypeError, "Scaled"),
        (lambda: FusedLinear.from_tensors(torch.zeros(4, 4, dtype=torch.int8), None), TypeError, "torch.int8"),
        (lambda: FusedLinear.from_tensors(torch.zeros(4), None), ValueError, "2 dimensions"),
        (lambda: FusedLinear.from_tensors(torch.zeros(4, 3), torch.zeros(3)), ValueError, "shape"),
    ],
)
def test_errors_are_one_clear_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_old_weight_norm_is_refused():
    with pytest.warns(FutureWarning):
        linear = nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="computes its weight"):
        FusedLinear.from_linear(linear)
