"""What a forward asks of gradients, devices and classes: the program answers as the original would."""

import pytest
import torch
from torch import is_grad_enabled, nn
from torch import is_grad_enabled as asked_for_gradients
from torch.utils.checkpoint import checkpoint

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


class Asking(nn.Module):
    ask = staticmethod(is_grad_enabled)

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y * 2 if ASKING[self.way](self) else y


ASKING = {
    "imported": lambda m: is_grad_enabled(),
    "under another name": lambda m: asked_for_gradients(),
    "of the class": lambda m: m.ask(),
    "by name": lambda m: getattr(torch, "is_grad_enabled")(),  # noqa: B009
}


@pytest.mark.parametrize("way", ASKING)
def test_a_question_for_gradients(way):
    model = Asking(way).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fused(X), model(X))


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * (2 if isinstance(x, nn.Parameter) else 1)


@torch.no_grad()
def test_the_class_of_an_argument():
    model = Classes().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    for x in (X, nn.Parameter(X, requires_grad=False), X):
        torch.testing.assert_close(fused(x), model(x))
    assert hits(fused) == 2


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


@pytest.mark.parametrize(
    "layout", [lambda w: w.t(), lambda w: w.view(8, 8).flip(0).t().t(), lambda w: w[:, [1, 0, *range(2, 8)]]]
)
@torch.no_grad()
def test_weights_that_lie_otherwise_at_the_same_place(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each[0].weight.data = layout(each[0].weight.data)
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


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda y: torch.relu(self.linear(y)), x, use_reentrant=True) * 2


def test_a_reentrant_checkpoint():
    model = Checkpointed().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    grads = []
    for each in (model, fused):
        x = X.clone().requires_grad_()
        each(x).sum().backward()
        grads.append((x.grad, each.linear.weight.grad))
    torch.testing.assert_close(grads[1], grads[0])


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
