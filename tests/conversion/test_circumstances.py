"""What is around a model while it is converted, and modes that it is left in, are in no program that serves later."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import kfconvert
from kfconvert import ConversionError, ModelConverter
from kfconvert.inputs import example_call

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
    [lambda: LeftInTrainMode(Asking()), lambda: Around(LeftInTrainMode(Asking())), WithoutEval],
    ids=["asking", "part", "without eval"],
)
def test_a_module_that_eval_leaves_in_train_mode(make, tmp_path):
    model = make()
    fused = convert(copy.deepcopy(model))
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "artifact"), make())
    for each in (model, fused, loaded):
        in_eval_mode(each)
    assert_same(model, fused)
    assert_same(model, loaded)


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


def test_within_cached_parametrizations_nothing_is_converted():
    with parametrize.cached(), pytest.raises(ConversionError, match=r"^exit the parametrize.cached\(\) first"):
        convert(WithoutEval())


def test_a_default_device_around_a_conversion_is_none_of_these():
    model = WithoutEval().train(False)
    with torch.device("cpu"):
        fused = convert(model)
        assert_same(model, fused)


def test_generated_inputs_are_on_the_models_device_whatever_the_default_device():
    for model, shape in ((nn.Embedding(9, 8), (2, 3)), (Asking(), (2, 8))):
        with torch.device("meta"):
            call = example_call(model, shape, None, torch.device("cpu"), None)
        assert all(tensor.device.type == "cpu" for tensor in call.tensors())


@pytest.mark.cuda
def test_a_default_device_that_is_the_models():
    ids = torch.arange(6).reshape(2, 3)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.ReLU()).eval()
        fused = ModelConverter(select="all").convert_model(model, input_shape=(2, 3))
        torch.testing.assert_close(fused(ids.cuda()), model(ids.cuda()))
    assert fused.kfconvert_info()["guard"]["hits"]
