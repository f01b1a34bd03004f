"""What is around a model while it is converted, and modes that it is left in, are in no program that serves later."""

import copy

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ModelConverter

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
