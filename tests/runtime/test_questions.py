"""What a forward asks of gradients, devices and classes: the program answers as the original would."""

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return torch.relu(self.linear(x)) * len(str(self.scale))


@torch.no_grad()
def test_the_text_of_a_buffer():
    model = Told().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    for value in (1.0, 0.123, 3e10):
        for each in (model, fused):
            each.scale.fill_(value)
        torch.testing.assert_close(fused(X), model(X))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x)


@pytest.mark.parametrize("strategy", ["merged", "mkl"])
@torch.no_grad()
def test_a_transposed_weight_among_merged_ones(strategy, monkeypatch):
    monkeypatch.setattr("kfconvert.modules.linear.HAS_MKL", strategy == "mkl")
    monkeypatch.setattr("kfconvert.modules.linear.MKL_MIN_WEIGHT_BYTES", 0)
    x = torch.randn(2, 20, 16)
    model = Projections().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    torch.testing.assert_close(fused(x), model(x))
    for each in (model, fused):
        each.k.weight.data = each.k.weight.data.t()
    torch.testing.assert_close(fused(x), model(x))


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)), torch.arange(4)


@torch.no_grad()
def test_another_default_device():
    model = Made().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    assert fused(X)[1].device.type == "cpu"
    with torch.device("meta"):
        assert fused(X)[1].device == model(X)[1].device == torch.device("meta")
    assert hits(fused) == 1 and fused(X)[1].device.type == "cpu" and hits(fused) == 2
