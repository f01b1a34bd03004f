"""The validator accepts rounding differences and nothing else."""

import copy
import dataclasses
import gc
import json
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from kfconvert.accuracy.comparison import compare, split_inputs
from kfconvert.accuracy.float64_run import Reference, model_outputs
from kfconvert.validator import validate_optimization


class Block(nn.Module):
    """Linear, erf GELU, linear."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.act = nn.GELU(approximate)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Reassociated(Block):
    """The same formula with both products summed in two halves, rounded to the dtype once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.down, self.act(self.product(self.up, x)))

    @staticmethod
    def product(linear: nn.Linear, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        halves = zip(x.to(wide).chunk(2, -1), linear.weight.to(wide).chunk(2, -1))
        return (linear.bias + sum(part @ weight.T for part, weight in halves)).to(x.dtype)


class Wrapped(nn.Module):
    """Calls `change` on the outputs of another module."""

    def __init__(self, inner: nn.Module, change):
        super().__init__()
        self.inner = inner
        self.change = change

    def forward(self, *args, **kwargs):
        return self.change(self.inner(*args, **kwargs))


class Formula(nn.Module):
    """A module around a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 5, 32, generator=torch.Generator().manual_seed(1))


def same_weights(cls: type[Block], source: Block, **options) -> Block:
    module = cls(**options)
    module.load_state_dict(source.state_dict())
    return module.to(next(source.parameters()).dtype).eval()


def planted(index: int, value: float):
    def change(out: Tensor) -> Tensor:
        out = out.clone()
        out.view(-1)[index] = value
        return out

    return change


# what has to pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_reassociated_sums_pass(block, x, dtype):
    block, x = block.to(dtype), x.to(dtype)
    result = validate_optimization(block, same_weights(Reassociated, block), x)
    assert result.passed, result.reason
    assert result.reason is None
    assert result.reference == "float64 run of the original"
    assert (result.original_error.max_rel == 0) == (dtype == torch.float64)
    assert result.optimized_error.max_rel < 20 * torch.finfo(dtype).eps


def test_errors_are_those_of_the_formula(block, x):
    truth = copy.deepcopy(block).double()(x.double()).detach()
    out = block(x).detach().double()
    error, scale = (out - truth).abs(), truth.abs().max()
    result = validate_optimization(block, copy.deepcopy(block), x)
    stats = result.original_error
    assert result.passed and result.ratio == 1.0 and stats == result.optimized_error
    assert stats.scale == pytest.approx(scale.item())
    assert stats.max_abs == pytest.approx(error.max().item())
    assert stats.mean_abs == pytest.approx(error.mean().item())
    assert stats.max_rel == pytest.approx((error.max() / scale).item())
    assert stats.mean_rel == pytest.approx((error.mean() / scale).item())


def test_within_the_threshold_passes_whatever_the_original_does(block, x):
    scale = block(x).abs().max().item()
    slightly_off = Wrapped(block, lambda out: out + 5e-4 * scale)
    assert not validate_optimization(block, slightly_off, x).passed
    assert validate_optimization(block, slightly_off, x, accuracy_threshold=1e-3).passed


def test_the_exact_result_rounded_to_the_dtype_always_passes():
    """The original may hit the exact value by luck; nobody can ask for better than correct rounding."""
    truth = torch.tensor([1.0, 1.0 + 2**-11])
    lucky, rounded = torch.tensor([1.0, 1.0]).half(), torch.tensor([1.0, 1 + 2**-10]).half()
    result = compare(Reference(truth, "exact"), lucky, rounded)
    assert result.passed, result.reason


def test_all_zero_outputs():
    zeros = Formula(lambda x: x * 0)
    result = validate_optimization(zeros, Formula(lambda x: x * 0.0), torch.ones(4))
    assert result.passed and result.optimized_error.max_rel == 0 and result.ratio is None
    result = validate_optimization(zeros, Formula(lambda x: x * 0 + 1e-30), torch.ones(4))
    assert not result.passed and math.isinf(result.optimized_error.max_rel)


class Remainder(nn.Module):
    """The norm of one value is 0, but for what rounding leaves; ``noise`` is left in every third row."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise

    def forward(self, x):
        left = torch.zeros(len(x), 1, dtype=x.dtype)
        if x.dtype is not torch.float64:
            left[::3] = self.noise
        return left


@pytest.mark.parametrize("dtype, noise", [(torch.float16, 4e-7), (torch.float32, 4e-6), (torch.bfloat16, 1e-5)])
def test_what_rounding_leaves_of_zeros_is_no_scale(dtype, noise):
    x = torch.ones(12, 4, dtype=dtype)
    eps = torch.finfo(dtype).eps
    for other in (0.0, noise, -noise / 4, min(eps, noise * 1.4)):
        assert validate_optimization(Remainder(noise), Remainder(other), x).passed
    for wrong in (max(eps, noise) * 4, 1.0):
        result = validate_optimization(Remainder(noise), Remainder(wrong), x)
        assert not result.passed and "where the float64 run of the original is 0" in result.reason


def test_empty_batch(block):
    result = validate_optimization(block, same_weights(Reassociated, block), torch.empty(0, 32))
    assert result.passed and result.optimized_error.max_rel == 0


# what has to fail


def test_one_wrong_element_fails(block, x):
    value = block(x).detach().view(-1)[77].item()
    result = validate_optimization(block, Wrapped(block, planted(77, value + 1e-3)), x)
    assert not result.passed
    assert "has error" in result.reason and "\n" not in result.reason
    assert result.ratio > 100


def test_tanh_gelu_for_erf_gelu_fails(block, x):
    result = validate_optimization(block, same_weights(Block, block, approximate="tanh"), x)
    assert not result.passed
    assert result.ratio > 10


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_planted_non_finite_value_fails(block, x, value):
    result = validate_optimization(block, Wrapped(block, planted(3, value)), x)
    assert not result.passed
    assert "1 values" in result.reason


def test_non_finite_values_must_agree_in_kind_and_place():
    x = torch.tensor([-1.0, 0.0, 1.0, 4.0])
    original = Formula(lambda x: torch.cat([x.log(), x.sqrt()]))  # nan, -inf, 0, ...
    assert validate_optimization(original, Formula(lambda x: torch.cat([x.log(), x.sqrt()])), x).passed
    wrong_sign = Formula(lambda x: torch.cat([x.log().where(x != 0, math.inf), x.sqrt()]))
    assert not validate_optimization(original, wrong_sign, x).passed
    number_for_nan = Formula(lambda x: torch.cat([x.log().nan_to_num(0.0, neginf=-math.inf), x.sqrt()]))
    assert not validate_optimization(original, number_for_nan, x).passed


def test_overflow_of_the_original_has_to_be_shared():
    original = Formula(lambda x: x * x)
    x = torch.tensor([300.0, 2.0], dtype=torch.float16)
    assert validate_optimization(original, Formula(lambda x: x**2), x).passed
    assert not validate_optimization(original, Formula(lambda x: (x * x).clamp(max=65504)), x).passed


def test_a_reference_that_overflows_is_replaced_visibly():
    ours = torch.tensor([1.0, 2.0])
    reference = Reference(torch.tensor([1.0, math.inf], dtype=torch.float64), "float64 run of the original")
    result = compare(reference, ours, ours.clone())
    assert result.passed and "1 values that are not finite" in result.reference
    assert not compare(reference, ours, torch.tensor([1.0, 2.1])).passed


def test_integer_outputs_must_be_equal():
    original = Formula(lambda x: {"values": x.exp(), "order": x.argsort()})
    x = torch.randn(50)
    assert validate_optimization(original, copy.deepcopy(original), x).passed
    wrong = Formula(lambda x: {"values": x.exp(), "order": x.argsort().flip(0)})
    result = validate_optimization(original, wrong, x)
    assert not result.passed
    assert "output.order" in result.reason and "exact values" in result.reason


def test_integers_may_differ_where_the_original_differs_from_float64_as_well():
    truth = torch.arange(10)
    ours = truth.clone()
    ours[:4] = ours[:4].flip(0)  # 4 places
    reference = Reference(truth, "float64 run of the original")

    def judged(places: int):
        theirs = truth.clone()
        theirs[10 - places :] = -1
        return compare(reference, ours, theirs)

    result = judged(6)
    assert result.passed and result.differing == 10
    assert "differs from the original's in 10 of 10 exact values" in result.summary()
    assert "in 6 where the original differs in 4" in result.summary()
    assert not judged(7).passed and "in 7 where the original differs in 4" in judged(7).reason


def test_only_integer_outputs():
    original = Formula(lambda x: x > 0)
    result = validate_optimization(original, Formula(lambda x: x > 0), torch.randn(5))
    assert result.passed and result.original_error is None
    assert "equal" in result.summary()
    assert not validate_optimization(original, Formula(lambda x: x >= -9), torch.tensor([-1.0, 1.0])).passed


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda out: out[:1], "shape"),
        (lambda out: out.double(), "dtype"),
        (lambda out: (out,), "structure"),
        (lambda out: None, "is None"),
        (lambda out: 3, "is 3"),
        (lambda out: out.to("meta"), "is on meta"),
    ],
)
def test_other_shape_dtype_structure_or_device_fails(block, x, change, words):
    result = validate_optimization(block, Wrapped(block, change), x)
    assert not result.passed
    assert words in result.reason


def test_an_optimised_model_that_raises_fails_with_its_message(block, x):
    def fail(out):
        raise RuntimeError("kernel refused\nsecond line")

    result = validate_optimization(block, Wrapped(block, fail), x)
    assert not result.passed and result.reason == "the optimized model failed: RuntimeError: kernel refused"


def test_errors_of_the_original_are_raised(block):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        validate_optimization(block, copy.deepcopy(block), torch.randn(2, 31))


def test_nothing_to_compare_is_not_a_pass():
    silent = Formula(lambda x: ())
    result = validate_optimization(silent, silent, torch.ones(1))
    assert result.passed is None and result.summary() == "the outputs have nothing that can be compared"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * math.nan,
        lambda x: x.abs() / 0,
        lambda x: (x * math.nan, x[0] * math.nan),
        lambda x: {"values": x * math.nan, "order": x.argsort()},
        lambda x: nn.functional.batch_norm(x, torch.zeros(5), torch.full((5,), -1.0)),
        lambda x: torch.complex(x, x) * math.nan,
    ],
    ids=["nan", "infinite", "every output", "beside integers", "variance below 0", "complex"],
)
def test_outputs_without_a_finite_value_prove_nothing(function):
    x = torch.randn(4, 5)
    result = validate_optimization(Formula(function), Formula(function), x)
    assert result.passed is None and result.as_dict()["passed"] is None
    assert "nothing could be compared" in result.summary() and "NaN" in result.reason


def test_an_output_without_a_finite_value_is_named_beside_others():
    function = Formula(lambda x: (x, x * math.nan))
    result = validate_optimization(function, function, torch.randn(4))
    assert result.passed and "output[1] is entirely NaN or infinite" in result.reference


# structures


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


class Cache:
    """An opaque object that holds tensors, and a cycle."""

    def __init__(self, keys: Tensor):
        self.layers = [keys]
        self.dtype = keys.dtype
        self.owner = self


@pytest.mark.parametrize(
    "wrap, name",
    [
        (lambda t: (t, None), "[0]"),
        (lambda t: {"a": [t], "n": 3, "s": "text", "none": None}, ".a[0]"),
        (lambda t: Pair(t), ".first"),
        (lambda t: Cache(t), ".layers[0]"),
        (lambda t: torch.complex(t, t), ""),
        (lambda t: t.detach().numpy(), ""),
        (lambda t: t.sum().item(), ""),
    ],
)
def test_every_container_is_looked_into(wrap, name):
    original = Formula(lambda x: wrap(x.tanh()))
    x = torch.randn(20)
    result = validate_optimization(original, Formula(lambda x: wrap(x.tanh())), x)
    assert result.passed, result.reason
    assert result.original_error.leaf == name
    result = validate_optimization(original, Formula(lambda x: wrap(x.tanh() * 1.001)), x)
    assert not result.passed and f"output{name} " in result.reason


def test_the_errors_of_each_output_are_told():
    original = Formula(lambda x: {"a": x.tanh(), "b": x.exp(), "count": torch.tensor(3)})
    scaled = Formula(lambda x: {"a": x.tanh() * 1.001, "b": x.exp(), "count": torch.tensor(3)})
    result = validate_optimization(original, scaled, torch.randn(20))
    (own, new), (same, equal) = result.outputs
    assert new.leaf == own.leaf == ".a" and new == result.optimized_error and new.max_rel > 100 * own.max_rel
    assert same == equal and same.leaf == ".b"
    told = json.loads(json.dumps(result.as_dict()))["outputs"]
    assert [each["optimized_error"]["max_rel"] for each in told] == [new.max_rel, equal.max_rel]


def test_another_container_type_or_plain_value_fails():
    original = Formula(lambda x: (x, 3, "a"))
    result = validate_optimization(original, Formula(lambda x: [x, 3, "a"]), torch.ones(2))
    assert not result.passed and "is a list, the original's is a tuple" in result.reason
    for other in ((4, "a"), (3, None)):
        assert not validate_optimization(original, Formula(lambda x, other=other: (x, *other)), torch.ones(2)).passed


@pytest.mark.parametrize(
    "inputs, expected",
    [
        (1, ((1,), {})),
        ((1, 2), ((1, 2), {})),
        ([1, 2], ((1, 2), {})),
        ({"a": 1}, ((), {"a": 1})),
        (((1,), {"a": 2}), ((1,), {"a": 2})),
        ((1, {"a": 2}), ((1, {"a": 2}), {})),
    ],
)
def test_split_inputs(inputs, expected):
    assert split_inputs(inputs) == expected


def test_data_dependent_shapes_fall_back_to_the_original():
    # 2**-30 is lost beside 1 in float32 but not in float64: the float64 run keeps one value more
    model = Formula(lambda x: x[1 + x > 1])
    x = torch.tensor([1.0, 2.0**-30, 0.5])
    result = validate_optimization(model, copy.deepcopy(model), x)
    assert result.passed and "another shape" in result.reference


# what must be left alone


def test_models_inputs_and_random_state_are_untouched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    model[1].eval()
    flags = [module.training for module in model.modules()]
    optimized = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(tensor) for name, tensor in model.named_parameters()}
    x = torch.randn(4, 8, requires_grad=True)
    saved, state = x.detach().clone(), torch.get_rng_state()

    result = validate_optimization(model, optimized, x)

    assert result.passed and result.ratio == 1.0  # dropout would give two different results
    for module in (model, optimized):
        assert [m.training for m in module.modules()] == flags
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == identities
    assert torch.equal(x, saved) and torch.equal(torch.get_rng_state(), state)


# reports


def test_results_are_frozen_and_ready_for_json(block, x):
    changes = (lambda out: out, lambda out: out * math.nan, lambda out: None)
    for optimized in (Wrapped(block, change) for change in changes):
        result = validate_optimization(block, optimized, x)
        text = json.dumps(result.as_dict(), allow_nan=False)
        assert json.loads(text)["passed"] is result.passed
        assert "\n" not in result.summary()
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.passed = True
    result = validate_optimization(Formula(lambda x: x * 0), Formula(lambda x: x + 1), torch.ones(1))
    assert result.as_dict()["optimized_error"]["max_rel"] is None


def test_outputs_are_released_without_a_garbage_collection():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    reference, outputs = Reference(model.double()(x.double()), "float64 run"), model.float()(x)
    known = weakref.ref(outputs)
    gc.disable()
    try:
        assert compare(reference, outputs, outputs).passed
        del outputs
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.cuda
def test_on_a_gpu_memory_and_random_state_are_given_back():
    model = nn.Linear(512, 512, device="cuda").half()
    x = torch.randn(4, 512, device="cuda").half()
    optimized = copy.deepcopy(model)
    model_outputs(model, (x,), {})
    gc.collect()  # what earlier tests left behind must not count as given back
    used, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    result = validate_optimization(model, optimized, x)
    assert result.passed and result.original_error.max_rel > 0
    assert torch.cuda.memory_allocated() == used
    assert torch.equal(torch.cuda.get_rng_state(), state)


class Padded(nn.Module):
    """Puts zeros in the place of padding, but not in float64."""

    def forward(self, x):
        y = torch.tanh(x)
        return y if x.dtype is torch.float64 else torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1)


def test_values_that_the_float64_run_makes_in_another_way():
    x = torch.randn(8, 16)
    assert validate_optimization(Padded(), Padded(), x).passed
    assert not validate_optimization(Padded(), nn.Tanh(), x).passed
