"""Patterns that a user registers: what is found, what takes its place, and what is refused in one line."""

import time

import pytest
import torch
import torch.nn.functional as F
from support import own_functions as own
from support.own_conversions import convert, reasons, registered
from torch import nn

import kfconvert
from kfconvert import ModelConverter, PatternError, register_pattern, unregister_pattern
from kfconvert.patterns import every_pattern

X = torch.randn(3, 8)


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    yield
    for pattern in every_pattern():
        if pattern.source is not None:
            unregister_pattern(pattern.name)


class Net(nn.Module):
    """Layers, each followed by ``function``."""

    def __init__(self, function, layers=1, features=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.function = function

    def forward(self, x):
        for layer in self.layers:
            x = self.function(layer(x))
        return x


class Function(nn.Module):
    """One function of the module itself, which has a parameter, and of one or two tensors."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x, y=None):
        return self.function(self, x) if y is None else self.function(self, x, y)


def check_fused(model, name, *inputs, count=1, **options):
    converted, stats = convert(model, *inputs, **options)
    assert stats[f"{name}_replaced"] == count, reasons(stats, name)
    assert stats["accuracy"]["passed"]
    eps = torch.finfo(inputs[0].dtype).eps
    with torch.no_grad():
        torch.testing.assert_close(converted(*inputs), model(*inputs), rtol=20 * eps, atol=20 * eps)
    assert converted.kfconvert_info()["guard"]["misses"] == {}
    return converted


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 8), torch.float32), ((2, 5, 8), torch.float64), ((2, 3, 4, 8), torch.bfloat16), ((2, 5, 8), torch.float16)],
)
def test_it_is_found_for_tensors_of_any_shape_and_floating_dtype(shape, dtype):
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        check_fused(Net(own.swish, 2).to(dtype), "own_swish", torch.randn(shape, dtype=dtype), count=2)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: torch.sigmoid(x * 1.7) * x,
        lambda x: (1.7 * x).sigmoid() * x,
        lambda x: x * torch.tensor(1.7, dtype=torch.float64).to(x.dtype).mul(x).sigmoid(),
        lambda x: F.dropout(x, 0.5, False) * torch.sigmoid(1.7 * x),
    ],
)
def test_other_spellings_of_it_are_found(spelling):
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        check_fused(Net(spelling), "own_swish", X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x * torch.sigmoid(1.71 * x),
        lambda x: x * torch.sigmoid(1.7 * x * x),
        lambda x: x + torch.sigmoid(1.7 * x),
    ],
)
def test_what_computes_something_else_is_not_found(other):
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        _, stats = convert(Net(other), X)
        assert stats["own_swish_found"] == 0


def test_any_number_may_take_the_place_of_one_that_is_an_argument():
    def two(x):
        return own.softcap(own.softcap(x, 30.0), 5)

    with registered(own.softcap, own.softcap_replacement, (X, 20.0), name="softcap"):
        check_fused(Net(two), "softcap", 10 * X, count=2)


def test_arguments_may_be_keywords():
    def reference(x, *, cap, dim):
        return torch.softmax(cap * torch.tanh(x / cap), dim)

    with registered(reference, reference, {"x": X, "cap": 3.0, "dim": -1}, name="capped"):
        check_fused(Net(lambda x: torch.softmax(2.0 * torch.tanh(x / 2.0), -1)), "capped", X)
        _, stats = convert(Net(lambda x: torch.softmax(2.0 * torch.tanh(x / 2.0), 0)), X)
        assert stats["capped_found"] == 0


def test_defaults_of_the_reference_are_no_part_of_the_call():
    def reference(x, cap=20.0):
        return own.softcap(x, cap)

    with registered(reference, own.softcap_replacement, (X, 20.0), name="softcap"):
        check_fused(Net(lambda x: own.softcap(x, 4.0)), "softcap", 10 * X)
    with registered(reference, lambda x: own.softcap_replacement(x, 20.0), X, name="softcap"):
        _, stats = convert(Net(lambda x: own.softcap(x, 4.0)), X)
        assert stats["softcap_found"] == 0


def test_casts_are_those_of_each_dtype():
    def reference(x):
        return torch.sigmoid(1.7 * x.float()).to(x.dtype) * x

    with registered(reference, lambda x: own.swish(x.float()).to(x.dtype), X, name="own_swish"):
        for dtype in (torch.float32, torch.bfloat16):
            check_fused(Net(reference).to(dtype), "own_swish", X.to(dtype))


def test_several_results_are_found_together():
    def reference_calls(module, x, residual):
        normed, total = own.residual_norm(x, residual, module.weight, 1e-5)
        return normed @ normed.mT, total - 1

    example = (X, X, torch.randn(8), 1e-6)
    with registered(own.residual_norm, own.residual_norm, example, name="own_norm"):
        check_fused(Function(reference_calls), "own_norm", torch.randn(2, 4, 8), torch.randn(2, 4, 8))


def test_results_that_share_arguments_only_are_found_together():
    def forward(module, q, k):
        q, k = own.rotated(q + 1, k + 1, module.weight.cos(), module.weight.sin())
        return q - k

    with registered(own.rotated, own.rotated, (X, X, X[0], X[0]), name="rotated"):
        check_fused(Function(forward), "rotated", torch.randn(2, 4, 8), torch.randn(2, 4, 8))


def test_an_argument_may_not_be_computed_from_a_result():
    def forward(module, q):
        cos, sin = module.weight.cos(), module.weight.sin()
        q = q * cos + torch.roll(q, 1, -1) * sin
        k = q.exp()
        return q, k * cos + torch.roll(k, 1, -1) * sin

    with registered(own.rotated, own.rotated, (X, X, X[0], X[0]), name="rotated"):
        model = Function(forward)
        converted, stats = convert(model, X)
        assert any("before all arguments" in reason for reason in reasons(stats, "rotated"))
        with torch.no_grad():
            torch.testing.assert_close(converted(X), model(X))


def test_an_inner_value_that_others_use_is_no_match():
    def forward(module, x):
        gate = torch.sigmoid(1.7 * x)
        return x * gate, gate

    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        _, stats = convert(Function(forward), X)
        assert any("also used by the model's output" in reason for reason in reasons(stats, "own_swish"))


@pytest.mark.parametrize("inputs", [(X,), (torch.randn(2, 6, 8),)])
def test_sizes_that_the_reference_computes_with_are_those_of_the_match(inputs):
    def reference(x):
        return torch.relu(x.reshape(*x.shape[:-1], 2, -1)).transpose(-1, -2) * x.shape[-1] ** -0.5

    def other(x):
        return torch.relu(x.reshape(*x.shape[:-1], 2, -1)).transpose(-1, -2) * 0.5

    with registered(reference, reference, (torch.randn_like(inputs[0]),), name="halves"):
        check_fused(Function(lambda module, x: reference(x + 1)), "halves", *inputs)
        _, stats = convert(Function(lambda module, x: other(x + 1)), *inputs)
        assert any("computes something else" in reason for reason in reasons(stats, "halves"))


def test_sizes_of_one_in_the_example_are_no_part_of_the_pattern():
    def reference(x, y):
        return torch.tanh(x.reshape(x.shape[0], -1)) * y

    model = Function(lambda module, x: reference(x + 1, module.weight))
    with registered(reference, reference, (torch.randn(1, 2, 2), torch.randn(4)), name="flat_tanh"):
        check_fused(model, "flat_tanh", torch.randn(3, 2, 4))


def test_a_reference_that_decides_by_a_free_size_is_refused_there():
    def reference(x):
        return torch.relu(x) * 2.5 if x.shape[0] > 2 else torch.relu(x) * 3.5

    with registered(reference, reference, X, name="by_size"):
        _, stats = convert(Function(lambda module, x: torch.relu(x) * 2.5 + 1), X)
        assert any("depends on free sizes" in reason for reason in reasons(stats, "by_size"))


def test_when_refuses_by_shape_dtype_and_number():
    seen = []

    def when(match):
        seen.append(match)
        return "the cap is too small" if match["cap"] < 10 else match["x"].shape[-1] == 8

    with registered(own.softcap, own.softcap_replacement, (X, 20.0), name="softcap", when=when):
        check_fused(Net(lambda x: own.softcap(x, 30.0)), "softcap", X)
        (last,) = {match.name for match in seen}
        tensor = seen[-1]["x"]
        assert (last, tensor.shape, tensor.dtype) == ("softcap", (None, 8), torch.float32)
        assert (tensor.device.type, tensor.is_weight, seen[-1]["cap"]) == ("cpu", False, 30.0)
        _, stats = convert(Net(lambda x: own.softcap(x, 3.0)), X)
        assert reasons(stats, "softcap") == ["the cap is too small"]
        _, stats = convert(Net(lambda x: own.softcap(x, 30.0), features=4), torch.randn(3, 4))
        assert reasons(stats, "softcap") == ["when(match) rejects it"]


def test_an_error_of_when_is_the_reason_why_nothing_is_fused():
    with registered(own.swish, own.swish_replacement, X, name="own_swish", when=lambda match: match["y"]):
        _, stats = convert(Net(own.swish), X)
        assert reasons(stats, "own_swish") == ["when(match) raised KeyError: 'y'"]


def test_it_is_measured_and_left_out_where_it_is_slow():
    def slow(x):
        time.sleep(0.002)
        return own.swish(x)

    with registered(own.swish, slow, X, name="own_swish"):
        _, stats = convert(Net(own.swish), X, select="measured")
        (reason,) = reasons(stats, "own_swish")
        assert reason.startswith("not faster: replacement takes ")


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(own.swish)

    def forward(self, x):
        y = self.net(x)
        return y if y.sum() > -1e9 else x


def test_it_is_left_out_where_it_is_not_accurate():
    def rough(x):
        return own.swish(x) * 1.001

    with registered(own.swish, rough, X, name="own_swish"):
        _, stats = convert(Net(own.swish), X)
        (reason,) = reasons(stats, "own_swish")
        assert "against float64, allowed" in reason
    with registered(own.swish, rough, X, name="own_swish", numerics=0.01):
        _, stats = convert(Net(own.swish), X)
        (reason,) = reasons(stats, "own_swish")
        assert reason.startswith("dropped after validation")
        _, stats = convert(InParts(), X)
        (reason,) = {site["reason"] for site in stats["part_sites"] if site["pattern"] == "own_swish"}
        assert reason.startswith("dropped after validation")
        _, stats = convert(Net(own.swish), X, accuracy_threshold=0.01)
        (site,) = (site for site in stats["sites"] if site["pattern"] == "own_swish")
        assert (site["status"], site["numerics"]) == ("applied", "approximate")


def test_exact_numerics_want_the_very_values():
    with registered(own.softcap, own.softcap_replacement, (X, 4.0), name="softcap", numerics="exact"):
        check_fused(Net(lambda x: own.softcap(x, 30.0)), "softcap", X)
    with pytest.raises(PatternError, match="bit-for-bit"):
        register_pattern(own.swish, own.swish_replacement, X, name="own_swish", numerics="exact")


def test_a_replacement_that_fails_at_a_site_is_the_reason_that_is_told():
    def picky(x):
        if x.dim() > 2:
            raise ValueError("only matrices")
        return own.swish(x)

    with registered(own.swish, picky, X, name="own_swish"):
        model = Net(own.swish)
        converted, stats = convert(model, torch.randn(2, 3, 8))
        (reason,) = reasons(stats, "own_swish")
        assert reason.endswith("replacement: it raised ValueError: only matrices")


def test_it_is_chosen_by_its_name():
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        _, stats = convert(Net(own.swish), X, exclude=["own_*"])
        assert reasons(stats, "own_swish") == ["excluded by exclude=['own_*']"]
        check_fused(Net(own.swish), "own_swish", X, include=["own_swish"])
    with pytest.raises(kfconvert.ConversionError, match="no pattern is called 'own_swish'"):
        ModelConverter(include=["own_swish"])


def test_of_patterns_that_fit_as_well_a_users_own_comes_first_and_larger_ones_win():
    def reference(x, weight, bias):
        return F.gelu(F.linear(x, weight, bias))

    model = Net(F.gelu)
    _, stats = convert(model, X)
    assert stats["linear_gelu_replaced"] == 1
    with registered(reference, reference, (X, torch.randn(8, 8), torch.randn(8)), name="own_gelu"):
        check_fused(model, "own_gelu", X)
        check_fused(model, "linear_gelu", X, exclude=["own_gelu"])
    with registered(lambda x: F.gelu(x), lambda x: F.gelu(x), X, name="own_gelu"):
        check_fused(model, "linear_gelu", X)


def test_a_parameter_may_be_an_argument_and_is_read_anew():
    def reference(x, weight, bias):
        return torch.tanh(F.linear(x, weight, bias)) * 0.5

    with registered(reference, reference, (X, torch.randn(8, 8), torch.randn(8)), name="half_tanh"):
        model = Net(lambda x: torch.tanh(x) * 0.5)
        converted = check_fused(model, "half_tanh", X)
        for module in (converted, model):
            torch.manual_seed(1)
            nn.init.normal_(module.layers[0].weight)
        with torch.no_grad():
            torch.testing.assert_close(converted(X), model(X))


def test_an_exported_program_gets_the_reference():
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        model = Net(own.swish)
        converted = check_fused(model, "own_swish", X)
        program = kfconvert.export(converted, X)
        assert not any("own_swish" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(X), model(X))


def test_a_replacement_gets_contiguous_tensors():
    def replacement(x):
        assert x.is_contiguous()
        return own.swish_replacement(x)

    with registered(own.swish, replacement, X, name="own_swish"):
        model = Function(lambda module, x: own.swish(x.mT))
        converted = check_fused(model, "own_swish", torch.randn(2, 4, 8))
        x = torch.randn(2, 8, 4).mT
        with torch.no_grad():
            torch.testing.assert_close(converted(x), model(x))


def test_a_module_may_be_the_replacement_and_stays_in_its_mode():
    module = own.Swish().train()
    with registered(own.swish, module, X, name="own_swish"):
        check_fused(Net(own.swish), "own_swish", X)
    assert module.training


def test_tensors_are_broadcast_only_where_they_are_in_the_example():
    def reference(x, y):
        return x * torch.sigmoid(1.7 * y)

    model = Function(lambda module, x: reference(x + 1, module.weight))
    with registered(reference, reference, (X, X), name="gate"):
        _, stats = convert(model, X)
        assert reasons(stats, "gate") == ["x and y have equal shapes in the example, but not here"]
        check_fused(Function(lambda module, x: reference(x + 1, x + 2)), "gate", X)
    with registered(reference, reference, (X, X[0]), name="gate"):
        check_fused(model, "gate", X)


def test_times_of_it_are_not_kept_for_other_processes(tmp_path, monkeypatch):
    """Its code may have been changed meanwhile."""
    monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path))
    with registered(own.swish, own.swish_replacement, X, name="own_swish"):
        convert(Net(own.swish), torch.randn(200, 8), select="measured")
        convert(Net(own.swish), torch.randn(200, 8), select="measured")
    assert not [path for path in tmp_path.rglob("*.json") if "own_swish" in path.read_text()]


def test_a_name_is_given_once_and_taken_back():
    register_pattern(own.swish, own.swish_replacement, X, name="own_swish")
    with pytest.raises(PatternError, match="a pattern 'own_swish' already exists: unregister_pattern"):
        register_pattern(own.swish, own.swish_replacement, X, name="own_swish")
    unregister_pattern("own_swish")
    with pytest.raises(PatternError, match="no pattern is registered as 'own_swish'; registered are none"):
        unregister_pattern("own_swish")
    with pytest.raises(PatternError, match="a pattern 'linear_gelu' already exists$"):
        register_pattern(own.swish, own.swish_replacement, X, name="linear_gelu")
    _, stats = convert(Net(own.swish), X)
    assert "own_swish_found" not in stats


TABLE = torch.randn(8)
STATE = {"cap": nn.Parameter(torch.randn(8))}

BAD = {
    "control flow by values": (lambda x: x if x.sum() > 0 else -x, "depends on values of its arguments"),
    "no operators": (lambda x: x, "returns an argument unchanged"),
    "NumPy": (lambda x: torch.from_numpy(x.numpy() + 1), "cannot be traced"),
    "a tensor of the globals": (lambda x: x * TABLE, "a tensor that is not an argument"),
    "a parameter of the globals": (lambda x: x * STATE["cap"], "a tensor that is not an argument"),
    "random numbers": (lambda x: F.dropout(x) * 2, "random numbers"),
    "a write to its argument": (lambda x: x.mul_(2), "writes in place"),
    "an integer result": (lambda x: x.argmax(-1), "returns torch.int64"),
    "no tensor": (lambda x: 3, "values that are not tensors"),
    "a dict": (lambda x: {"y": x.exp()}, "must return a tensor or a tuple of tensors"),
    "a tuple within one": (lambda x: (x.exp(), (x.exp().sin(),)), "must return a tensor or a tuple"),
    "one tensor twice": (lambda x: (y := x.exp(), y), "one tensor twice"),
    "any number of arguments": (lambda *x: x[0] * 2, "any number of arguments"),
    "two arguments": (lambda x, y: x * y, "do not match its reference: missing a required argument: 'y'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_reference_that_is_no_pattern_is_refused_in_one_line(name):
    reference, expected = BAD[name]
    with pytest.raises(PatternError) as caught:
        register_pattern(reference, reference, X, name="bad")
    assert expected in str(caught.value) and "'bad'" in str(caught.value) and "\n" not in str(caught.value)
    assert all(pattern.name != "bad" for pattern in every_pattern())


def test_arguments_that_a_reference_does_not_use_or_computes_with_itself_are_refused():
    with pytest.raises(PatternError, match="does not use its argument y"):
        register_pattern(lambda x, y: x * 2, lambda x, y: x * 2, (X, X), name="bad")
    with pytest.raises(PatternError, match="does not use its argument scale"):
        register_pattern(lambda x, scale: x * 2, lambda x, scale: x * 2, (X, 3.0), name="bad")
    with pytest.raises(PatternError, match="computes with the number scale in Python"):
        register_pattern(lambda x, scale: x * (1 / scale), lambda x, scale: x / scale, (X, 3.0), name="bad")
    with pytest.raises(PatternError, match="the example input y of 'bad' is a list"):
        register_pattern(lambda x, y: x * y[0], lambda x, y: x * y[0], (X, [X]), name="bad")
    with pytest.raises(PatternError, match="result 1 shares no argument"):
        register_pattern(lambda x, y: (x.exp(), y.exp()), lambda x, y: (x.exp(), y.exp()), (X, X), name="bad")


REPLACEMENTS = {
    "another shape": (lambda x: own.swish(x)[:1], r"returns float32\[1, 8\] on cpu where the reference returns"),
    "another dtype": (lambda x: own.swish(x).double(), r"returns float64\[3, 8\] on cpu"),
    "several results": (lambda x: (own.swish(x), x), "returns 2 values, the reference 1"),
    "no tensor": (lambda x: 3, "returns a int where"),
    "a dict": (lambda x: {"y": own.swish(x)}, "returns a dict where"),
    "an error": (lambda x: 1 / 0, "it raised ZeroDivisionError: division by zero"),
    "a write": (lambda x: x.mul_(2).clone(), "it writes to an argument"),
    "memory of an argument": (lambda x: x.view(3, 8), "shares memory with an argument"),
    "tensors of its own": (nn.Linear(8, 8), "has tensors: make them arguments"),
    "no function": (3, "replacement of 'bad' must be a function, not 3"),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replacement_that_does_not_fit_is_refused_in_one_line(name):
    replacement, expected = REPLACEMENTS[name]
    with pytest.raises(PatternError, match=expected):
        register_pattern(own.swish, replacement, X, name="bad")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "a b"}, "name must be an identifier"),
        ({"name": "total"}, "name must be an identifier"),
        ({"numerics": "sloppy"}, "numerics of 'bad' must be"),
        ({"numerics": -1.0}, "numerics of 'bad' must be"),
        ({"when": 3}, "when of 'bad' must be a function"),
        ({"example_inputs": 3}, "the pattern 'bad': example_inputs must be a tensor, a tuple"),
        ({"example_inputs": (3.0,)}, "have no tensor"),
        ({"example_inputs": {"x": X.to(torch.complex64)}}, "the example input x of 'bad' has dtype torch.complex64"),
        ({"example_inputs": X.to("meta")}, "the example input x of 'bad' is on the meta device"),
        ({"example_inputs": {"y": X}}, "do not match its reference"),
        ({"example_inputs": (X, X)}, "do not match its reference: too many positional arguments"),
    ],
)
def test_other_arguments_of_no_use_are_refused_in_one_line(options, expected):
    options = {"example_inputs": X, "name": "bad", **options}
    with pytest.raises(PatternError, match=expected):
        register_pattern(own.swish, own.swish_replacement, **options)


@pytest.mark.cuda
def test_it_runs_on_a_gpu_in_every_floating_dtype():
    example = X.cuda()
    with registered(own.swish, own.swish_replacement, example, name="own_swish"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(16, 8, dtype=dtype, device="cuda")
            # The replacement rounds once more than what it stands for.
            allowed = {"accuracy_threshold": 4 * torch.finfo(dtype).eps}
            check_fused(Net(own.swish, 2).to("cuda", dtype), "own_swish", x, count=2, **allowed)
