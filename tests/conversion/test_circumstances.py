"""What is around a model while it is converted, and modes that it is left in, are in no program that serves later."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import kfconvert
from kfconvert import ConversionError, ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(4, 16)


class Asking(nn.Module):
    def forward(self, x):
        return 3 * x if self.training else x


class LeftInTrainMode(nn.Module):
    """As for Monte-Carlo dropout: what is within it is in train mode, whatever mode it has itself."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.inner = inner

    def train(self, mode=True):
        super().train(mode)
        self.inner.train()
        return self

    def forward(self, x):
        return self.inner(self.first(x))


class WithoutEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.5)

    def eval(self):
        return self

    def forward(self, x):
        return self.dropout(torch.relu(self.linear(x)))


class Around(nn.Module):
    """Cannot be captured as a whole."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 2 if float(x.sum()) > 1e9 else x)


def convert(model):
    return ModelConverter(select="all", effort="full").convert_model(model, example_inputs=X)


def in_eval_mode(model):
    for module in model.modules():
        module.training = False


def assert_same(model, fused):
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fused(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeftInTrainMode(nn.Dropout(0.5)),
        lambda: LeftInTrainMode(Asking()),
        lambda: Around(LeftInTrainMode(Asking())),
        WithoutEval,
    ],
    ids=["dropout", "asking", "part", "without eval"],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["converted", "loaded"])
def test_a_module_that_eval_leaves_in_train_mode(make, loaded, tmp_path):
    model = make()
    fused = convert(copy.deepcopy(model))
    if loaded:
        kfconvert.save(fused, tmp_path / "artifact")
        fused = kfconvert.load(tmp_path / "artifact", make())
    for each in (model, fused):
        in_eval_mode(each)
    assert_same(model, fused)


def test_parts_beside_a_module_in_train_mode_are_fused():
    model = LeftInTrainMode(Asking()).eval()
    fused = convert(copy.deepcopy(model))
    assert_same(model, fused)
    assert fused.kfconvert_info()["parts"]["first"]["hits"] == 2


def test_a_model_that_is_loaded_in_train_mode(tmp_path):
    model = WithoutEval().train(False)
    kfconvert.save(convert(model), tmp_path / "artifact")
    fused = kfconvert.load(tmp_path / "artifact", WithoutEval())
    for each in (model, fused):
        in_eval_mode(each)
    assert_same(model, fused)


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.last = nn.Linear(16, 16)  # which is fused, unlike the other

    def forward(self, x):
        return nn.functional.gelu(self.last(nn.functional.gelu(self.linear(x))))


def write_the_original(model):
    with torch.no_grad():
        model.linear.parametrizations.weight.original1.fill_(0.25)


@pytest.mark.parametrize("loaded", [False, True], ids=["converted", "loaded"])
def test_weights_that_are_kept_around_a_conversion(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("kfconvert.artifact.files.stored_graphs", lambda *_: None)  # so that it is traced again
    model = Parametrized().eval()
    with parametrize.cached():
        kept = model.linear.weight
        fused = convert(copy.deepcopy(model))
        if loaded:
            kfconvert.save(fused, tmp_path / "artifact")
            made = Parametrized()
            made(X)  # whose weight is kept before it is filled
            fused = kfconvert.load(tmp_path / "artifact", made)
        assert model.linear.weight is kept
        with parametrize.cached():
            pass
        assert model.linear.weight is kept
    assert model.linear.weight is not kept
    for each in (model, fused):
        write_the_original(each)
    assert_same(model, fused)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


def test_weights_that_are_kept_while_models_are_compared():
    model = Parametrized().eval()
    fused = convert(copy.deepcopy(model))
    with parametrize.cached():
        assert torch.equal(model(X), fused(X))
        for each in (model, fused):
            write_the_original(each)
        accurate = kfconvert.validate_optimization(model, fused, X, 1e-4)
    assert accurate.passed, str(accurate)


class Rounding(TorchFunctionMode):
    """As one that simulates low precision."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.round() if function is nn.functional.linear else result


def test_within_a_mode_of_functions_nothing_is_converted_or_loaded(tmp_path):
    model = WithoutEval().train(False)
    kfconvert.save(convert(model), tmp_path / "artifact")
    for call in (lambda: convert(model), lambda: kfconvert.load(tmp_path / "artifact", WithoutEval())):
        with Rounding(), pytest.raises(ConversionError, match="^exit the Rounding first"):
            call()


def test_a_default_device_around_a_conversion_is_none_of_these():
    model = WithoutEval().train(False)
    with torch.device("cpu"):
        fused = convert(model)
        assert_same(model, fused)
