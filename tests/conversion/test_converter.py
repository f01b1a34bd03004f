"""ModelConverter and auto_convert_model: inputs, options, reports, and what happens when a site goes wrong."""

import sys

import pytest
import torch
from torch import Tensor, nn

import kfconvert
from kfconvert import ConversionError, ModelConverter, validate_optimization
from kfconvert.modules import FusedLinear
from kfconvert.profiling import Comparison
from kfconvert.report import table as report
from kfconvert.runtime.dispatch.guarded import guarded_forward


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))


def test_statistics_have_every_promised_key():
    converter = ModelConverter(validate_accuracy=True, accuracy_threshold=1e-6, select="all")
    fused = converter.convert_model(mlp(), input_shape=(4, 16), device="cpu")
    stats = converter.conversion_stats
    assert stats["linear_relu_replaced"] == stats["linear_gelu_replaced"] == stats["layernorm_replaced"] == 1
    assert stats["conv_bn_relu_replaced"] == stats["layernorm_relu_replaced"] == stats["add_layernorm_found"] == 0
    assert stats["total_replaced"] == stats["total_found"] == 4 == len(stats["sites"])
    assert stats["speedup_achieved"] > 0 and stats["accuracy"]["passed"]
    assert [site["module"] for site in stats["sites"]] == ["0", "2", "4", "5"]
    assert stats["dynamic"] == ["input.shape[0]"]
    assert fused.kfconvert_info()["total_replaced"] == 4


def test_the_original_is_untouched():
    model = mlp().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ModelConverter(select="all", effort="fast").convert_model(model, input_shape=(4, 16), dtype=torch.float64)
    assert model.training and "forward" not in model.__dict__
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype is torch.float32


def test_converting_twice_in_place_is_converting_once():
    model, converter = mlp(), ModelConverter(select="all", effort="fast")
    expected, x = mlp(), torch.randn(3, 16)
    for _ in range(2):
        assert converter.convert_model(model, input_shape=(4, 16), inplace=True) is model
        assert converter.conversion_stats["total_replaced"] == 4 and guarded_forward(model) is not None
        torch.testing.assert_close(model(x), expected(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(mlp(), input_shape=(4, 16), dtype=dtype)
    assert converter.conversion_stats["total_replaced"] == 4
    assert fused(torch.randn(3, 16, dtype=dtype)).dtype is dtype


class Casting(nn.Module):
    """Of mixed dtypes: brings its input to that of its first layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x.to(torch.bfloat16))) * self.scale


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(Casting(), torch.float32), (Casting(), torch.float64), (nn.Linear(8, 8).half(), torch.float32)],
)
def test_example_inputs_are_only_cast_if_the_model_does_not_take_them(model, dtype):
    x = torch.randn(4, 8, dtype=dtype)
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=x)
    with torch.no_grad():
        fused(x if isinstance(model, Casting) else x.half())
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, extra=None, names=("a",)):
        return (self.norm(x + extra["residual"]), names)


@pytest.mark.parametrize("as_dict", [True, False])
def test_any_arguments(as_dict):
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    extra = {"residual": residual}
    inputs = {"x": x, "extra": extra} if as_dict else (x, extra)
    model, converter = TwoInputs().eval(), ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, example_inputs=inputs)
    assert converter.conversion_stats["add_layernorm_replaced"] == 1
    torch.testing.assert_close(fused(x, extra=extra)[0], model(x, extra)[0])
    assert fused(x, extra)[1] == ("a",)


class NamedAsTheCodeNames(nn.Module):
    """Its arguments have names that mean something else in generated code."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, torch: Tensor, inf: Tensor, device: Tensor) -> Tensor:
        hidden = self.linear(torch).relu().reshape(torch.shape[0], -1)
        return hidden.masked_fill(inf, float("inf")) * device


def test_arguments_may_have_any_name():
    model = NamedAsTheCodeNames().eval()
    inputs = torch.randn(2, 3, 6), torch.rand(2, 18) > 0.5, torch.rand(2, 1)
    converted = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=inputs)
    with torch.no_grad():
        torch.testing.assert_close(converted(*inputs), model(*inputs))
    assert converted.kfconvert_info()["guard"]["hits"] == 1


class WritesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        x.mul_(2.0)
        return torch.relu(self.second(hidden + x))


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_the_example_is_not_written():
    x = torch.randn(2, 6)
    before = x.clone()
    blocks = nn.Sequential(WritesItsInput(), WritesItsInput(), nn.LayerNorm(6), nn.ReLU())
    ModelConverter().convert_model(blocks.eval(), example_inputs=x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_shape": (4, 17)}, "does not accept float32"),
        ({"input_shape": (0, 16)}, "positive sizes"),
        ({"input_shape": (10**20, 16)}, "too many elements for any memory"),
        ({}, "exactly one"),
        ({"input_shape": (4, 16), "dtype": torch.int8}, "floating-point dtype"),
        ({"input_shape": (4, 16), "dtype": "float32"}, "floating-point dtype"),
        ({"input_shape": (4, 16), "device": "nonsense"}, "device nonsense"),
        ({"input_shape": (4, 16), "device": "meta"}, "device meta cannot be used: it has no data"),
        ({"example_inputs": 5}, "example_inputs must be"),
        ({"example_inputs": torch.zeros(4, 16, device="meta")}, "on the meta device, which has no values"),
        ({"example_inputs": torch.nested.nested_tensor([torch.zeros(2, 16)])}, "nested tensor with the strided layout"),
        ({"input_shape": (4, 16), "progress": 3}, r"progress must be a function of \(stage, done, total\), not 3"),
        ({"input_shape": (4, 16), "inplace": "no"}, "inplace must be True or False, not 'no'"),
        ({"input_shape": (4, 16), "profile": None}, "profile must be True or False, not None"),
        ({"input_shape": torch.zeros(2, 3)}, "not a tensor: pass a tensor as example_inputs$"),
        pytest.param(
            {"input_shape": (4, 16), "device": "cuda"},
            "device cuda cannot be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message):
    with pytest.raises(ConversionError, match=message) as error:
        ModelConverter().convert_model(mlp(), **arguments)
    assert "\n" not in str(error.value)


def test_what_is_not_a_module_or_option():
    with pytest.raises(ConversionError, match="torch.nn.Module"):
        ModelConverter().convert_model(torch.relu, input_shape=(1, 2))
    with pytest.raises(ConversionError, match="select"):
        ModelConverter(select="fastest")
    with pytest.raises(ConversionError, match="cuda_graphs must be True, False or 'auto', not 'never'"):
        ModelConverter(cuda_graphs="never")
    with pytest.raises(ConversionError, match="max_recordings must be a number of recordings, at least 1, not 0"):
        ModelConverter(max_recordings=0)


@pytest.mark.parametrize("threshold", [float("nan"), -1e-6, "1e-6", None])
def test_a_threshold_that_nothing_could_be_compared_with(threshold):
    with pytest.raises(ConversionError, match="accuracy_threshold must be a number of at least 0"):
        ModelConverter(accuracy_threshold=threshold)
    with pytest.raises(ValueError, match="accuracy_threshold must be a number of at least 0"):
        validate_optimization(mlp(), mlp(), torch.randn(4, 16), accuracy_threshold=threshold)


def test_an_empty_batch_among_the_examples():
    x = torch.randn(0, 16)
    fused = ModelConverter(select="all", effort="fast").convert_model(mlp(), example_inputs=x)
    assert fused(x).shape == mlp()(x).shape


def spoil(monkeypatch, features):
    """Make the fused linear with so many output features wrong by a little."""
    plan = FusedLinear.plan

    def spoiled(self, x):
        planned = plan(self, x)
        if self.out_features != features or _in_selection():
            return planned
        return lambda x: planned(x) + 1e-3

    monkeypatch.setattr(FusedLinear, "plan", spoiled)


def _in_selection():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_decide":
            return True
        frame = frame.f_back
    return False


def test_a_wrong_site_is_found_and_dropped(monkeypatch):
    """The site passes its own check (the error is planted after it), so only the whole-model validation can see it."""
    spoil(monkeypatch, 8)
    converter = ModelConverter(select="all", effort="fast")
    model = mlp()
    fused = converter.convert_model(model, input_shape=(4, 16))
    dropped = [site for site in converter.conversion_stats["sites"] if site["status"] == "rejected"]
    assert [site["module"] for site in dropped] == ["5"] and "dropped after validation" in dropped[0]["reason"]
    assert converter.conversion_stats["total_replaced"] == 3 and converter.conversion_stats["accuracy"]["passed"]
    x = torch.randn(3, 16)
    torch.testing.assert_close(fused(x), model(x))


def test_a_site_that_fails_its_own_check_is_rejected(monkeypatch):
    monkeypatch.setattr(FusedLinear, "plan", lambda self, x: lambda x: self.reference(x) * 1.01)
    converter = ModelConverter(select="all", effort="fast")
    converter.convert_model(mlp(), input_shape=(4, 16))
    reasons = {site["module"]: site["reason"] for site in converter.conversion_stats["sites"]}
    assert reasons["4"] is None and all("against float64" in reasons[name] for name in ("0", "2", "5"))


def test_a_model_that_got_slower_is_given_back_unconverted(monkeypatch):
    def slower(candidates, device, **options):
        times = {name: [1.0] * 50 for name in candidates}
        if "converted" in candidates:
            times["converted"] = [2.0] * 50
        return Comparison(times)

    monkeypatch.setattr("kfconvert.conversion.timing.compare_timings", slower)
    monkeypatch.setattr("kfconvert.conversion.selector.compare_timings", slower)
    converter = ModelConverter()
    with pytest.warns(UserWarning, match="slower as a whole: 2.00 x slower") as caught:
        fused = converter.convert_model(mlp(), input_shape=(4, 16))
    assert {warning.filename for warning in caught} == {__file__}  # the caller's line
    assert "the original is returned" in " ".join(str(converter.conversion_stats).split())
    assert converter.conversion_stats["total_replaced"] == 0 and guarded_forward(fused) is None
    assert converter.conversion_stats["speedup_achieved"] is None  # of what is given back
    assert converter.conversion_stats["timings"]["speedups"]["converted"]["ratio"] == 0.5
    assert "the original is returned" in report.speed_line(converter.conversion_stats)
    assert fused.kfconvert_info()["reverted"] == converter.conversion_stats["reverted"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_without_a_finite_output_is_given_back_unconverted(whole):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, x):
            if not whole and x.sum() > 1e9:
                return x
            return self.layers(x)

    model = Net().eval()
    model.layers[1].running_var.fill_(-1.0)
    converter = ModelConverter(select="all", effort="fast")
    with pytest.warns(UserWarning, match="fused nothing in Net: nothing could be compared"):
        fused = converter.convert_model(model, input_shape=(2, 3, 8, 8))
    stats = converter.conversion_stats
    assert stats["regions"][0]["captured"] == whole and stats["total_found"] > 0 and stats["total_replaced"] == 0
    assert stats["accuracy"]["passed"] is None and stats["speedup_achieved"] is None
    assert report.accuracy_line(stats).startswith("nothing could be compared: all values of the outputs are NaN")
    assert not any(guarded_forward(module) for module in fused.modules())


def test_a_strategy_that_a_library_refuses_is_not_taken(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("could not create a memory\nmore of it")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    monkeypatch.setattr("kfconvert.modules.conv._OneDNNConv.__call__", refuse)
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, input_shape=(1, 3, 8, 8))
    (site,) = converter.conversion_stats["sites"]
    assert site["status"] == "applied" and site["strategy"] != "onednn"
    monkeypatch.setattr("kfconvert.modules.conv.conv_act", refuse)
    with pytest.warns(UserWarning, match="could not create a memory"):
        converter.convert_model(model, input_shape=(1, 3, 8, 8))
    assert fused(torch.randn(1, 3, 8, 8)).shape == (1, 4, 6, 6)


def test_a_site_that_is_not_faster_is_rejected(monkeypatch):
    def original_wins(candidates, device, **options):
        return Comparison({name: [1.0 if name in ("original", "converted") else 2.0] * 20 for name in candidates})

    monkeypatch.setattr("kfconvert.conversion.selector.compare_timings", original_wins)
    converter = ModelConverter()
    with pytest.warns(UserWarning, match="fused nothing"):
        converter.convert_model(mlp(), input_shape=(4, 16))
    assert all("not faster" in site["reason"] for site in converter.conversion_stats["sites"])


def test_nothing_fused_says_what_came_closest():
    class Near(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return torch.relu(nn.functional.linear(x, self.weight * 2))

    converter = ModelConverter()
    with pytest.warns(UserWarning, match="nearest: linear at the root: the weight is computed in the forward"):
        converter.convert_model(Near(), input_shape=(1, 8))


def test_progress_is_reported_in_order():
    stages = []
    ModelConverter(select="all", effort="fast").convert_model(
        mlp(), input_shape=(4, 16), progress=lambda stage, done, total: stages.append(stage)
    )
    assert list(dict.fromkeys(stages)) == ["trace", "match", "select", "replace", "validate", "memory", "time"]


def test_shared_weights_and_repeated_modules():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)
            self.other.weight = self.linear.weight

        def forward(self, x):
            return torch.relu(self.other(torch.relu(self.linear(torch.relu(self.linear(x))))))

    model, converter = Tied(), ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, input_shape=(2, 8))
    assert converter.conversion_stats["linear_relu_replaced"] == 3
    x = torch.randn(3, 8)
    torch.testing.assert_close(fused(x), model(x))
    with torch.no_grad():
        fused.linear.weight.mul_(2), model.linear.weight.mul_(2)
    torch.testing.assert_close(fused(x), model(x))


def test_public_names():
    for name in kfconvert.__all__:
        assert getattr(kfconvert, name) is not None


def test_nothing_is_recorded_on_the_cpu():
    converter = ModelConverter(select="all", effort="fast", cuda_graphs=True)
    converted = converter.convert_model(mlp(), input_shape=(4, 16))
    with torch.no_grad():
        for _ in range(3):
            converted(torch.randn(4, 16))
    nothing = {
        "enabled": False, "max_recordings": 16, "static_outputs": False, "recordings": 0, "bytes": 0, "generated": 0,
        "replayed": 0, "launched": 0, "refused": {},
    }  # fmt: skip
    assert converter.conversion_stats["cuda_graphs"] == converted.kfconvert_info()["cuda_graphs"] == nothing
