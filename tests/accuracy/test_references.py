"""The truth that models are measured against is computed in float64 wherever that can be done."""

import copy

import pytest
import torch
from torch import Tensor, nn

from kfconvert.accuracy import float64_run
from kfconvert.accuracy.float64_run import model_outputs, reference_outputs
from kfconvert.validator import validate_optimization


class Casting(nn.Module):
    """Casts to ``dtype`` before a product, so that weights of another dtype do not fit."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.dtype)).to(x.dtype)


class RefusesFloat64(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64 here")
        return super().forward(x)


class Scaled(nn.Module):
    def __init__(self, model: nn.Module, factor: float):
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.factor


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_model_that_casts_by_itself_is_measured_against_float64(dtype):
    model, x = Casting(dtype).eval(), torch.randn(4, 8)
    reference = reference_outputs(model, (x,), {})
    assert reference.description.startswith("float64 run of the original and of its casts (the float64 run failed: ")
    assert reference.outputs.dtype is torch.float64
    exact = nn.functional.linear(x.double(), model.linear.weight.double(), model.linear.bias.double())
    torch.testing.assert_close(reference.outputs, exact, rtol=0, atol=1e-15)
    result = validate_optimization(model, copy.deepcopy(model), x)
    assert result.passed and result.original_error.max_rel > 0 and result.ratio == 1.0
    assert not validate_optimization(model, Scaled(model, 1 + 16 * torch.finfo(dtype).eps), x).passed


def test_casts_of_every_spelling_go_to_float64():
    class Spellings(Casting):
        def forward(self, x: Tensor) -> Tensor:
            held = torch.zeros(x.shape, dtype=torch.float32)
            held.copy_(x)
            scores = held.float().type(torch.float32).softmax(-1, dtype=torch.float32)
            return super().forward(scores + torch.arange(8, dtype=torch.float32).type_as(scores))

    model, x = Spellings(torch.float32), torch.randn(4, 8)
    outputs = reference_outputs(model, (x,), {}).outputs
    exact = model.linear.double()(x.double().softmax(-1) + torch.arange(8))
    torch.testing.assert_close(outputs, exact, rtol=0, atol=1e-14)


def test_bits_read_as_numbers_and_random_numbers_stay_as_they_are():
    class Bits(Casting):
        def forward(self, x: Tensor) -> Tensor:
            bits = torch.full((8,), 0x3F800000, dtype=torch.int32).view(torch.float32)
            return super().forward(x * bits) + torch.rand(8, dtype=torch.float32)

    model, x = Bits(torch.float32), torch.randn(4, 8)
    assert reference_outputs(model, (x,), {}).outputs.shape == (4, 8)
    result = validate_optimization(model, copy.deepcopy(model), x)
    assert result.original_error.max_rel < 1e-6


def test_a_half_model_that_refuses_float64_is_measured_against_float32():
    model, x = RefusesFloat64(64, 8).bfloat16(), torch.randn(4, 64).bfloat16()
    result = validate_optimization(model, copy.deepcopy(model), x)
    assert result.passed and result.original_error.max_rel > 0
    assert result.reference == "float32 run of the original (the float64 run failed: TypeError: no float64 here)"


def test_a_model_that_refuses_every_other_dtype_is_its_own_reference():
    model, x = RefusesFloat64(8, 8), torch.randn(4, 8)
    result = validate_optimization(model, copy.deepcopy(model), x)
    assert result.passed and result.original_error.max_rel == 0
    assert result.reference == "original itself (the float64 run failed: TypeError: no float64 here)"
    assert not validate_optimization(model, Scaled(model, 1.00001), x).passed


def test_training_flags_are_restored_after_an_error():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU())
    with pytest.raises(RuntimeError):
        model_outputs(model, (torch.randn(2, 3),), {})
    assert all(module.training for module in model.modules())


class Counting(nn.Module):
    """Counts its calls in a buffer, which scales the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class CastsToAnother(Tied):
    """Casts to the dtype of a weight outside of the call of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.head.weight.dtype)


class OfAnother(Tied):
    """Reads the weight of a module outside of its call, where it still has the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.embedding(x), self.head.weight)


IDS = torch.arange(9)[None]
LARGE = {
    "plain": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8), True),
    "repeated": (lambda: nn.Sequential(*[nn.Linear(8, 8)] * 3), torch.randn(4, 8), True),
    "counting": (Counting, torch.randn(4, 8), True),
    "tied": (Tied, IDS, True),
    "weight of another module": (OfAnother, IDS, False),
    "dtype of another module": (CastsToAnother, IDS, False),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_models_share_their_weights_with_the_reference(name, monkeypatch):
    make, x, shares = LARGE[name]
    model, made = make().eval().bfloat16(), []
    before = copy.deepcopy(model.state_dict())
    x = x.bfloat16() if x.is_floating_point() else x
    exact = reference_outputs(model, (x,), {}).outputs
    replica = float64_run._replica
    monkeypatch.setattr(float64_run, "_LARGE", 0)
    monkeypatch.setattr(float64_run, "is_of_libraries", lambda model: True)
    monkeypatch.setattr(float64_run, "_replica", lambda *args: made.append(args) or replica(*args))
    reference = reference_outputs(model, (x,), {})
    assert reference.description == "float64 run of the original" and bool(made) != shares
    torch.testing.assert_close(reference.outputs, exact, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
