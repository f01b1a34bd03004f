"""Operators that read where elements lie in memory, or fail by it, for inputs of another layout than the example's."""

import copy

import pytest
import torch
from support.selection import pairwise
from torch import nn

from kfconvert import ModelConverter, load, save

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


class Images(nn.Module):
    """``read(y)`` of what a convolution, or only a norm, makes of an image."""

    def __init__(self, read, body="conv"):
        super().__init__()
        self.conv, self.norm, self.read, self.body = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), read, body

    def forward(self, x):
        y = x if self.body == "none" else self.norm(self.conv(x) if self.body == "conv" else x)
        return self.read(torch.relu(y))


class Rows(nn.Module):
    """``read(x)`` goes through a linear layer."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(16, 16), read

    def forward(self, x):
        return torch.relu(self.linear(self.read(x)))


READERS = {
    "as_strided": lambda y: y.as_strided((3, 4), (2, 1)),
    "view as a larger type": lambda y: y.view(torch.float64).float(),
    "view": lambda y: y.view(y.shape[0], -1),
    "split": lambda y: y.view(y.shape[0], 2, 4, 6, 6).softmax(1),
}
X = torch.randn(4, 8, 6, 6)
LAYOUTS = {
    "contiguous": X,
    "channels last": X.to(memory_format=torch.channels_last),
    "transposed": X.transpose(2, 3),
    "slice": torch.randn(4, 16, 6, 6)[:, ::2],
    "slice of channels last": torch.randn(4, 16, 6, 6).to(memory_format=torch.channels_last)[:, :8],
    "fewer": X[:2],
}


def convert(model, example):
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast")
    return converter.convert_model(copy.deepcopy(model), example_inputs=(example,))


def outcome(model, x):
    try:
        with torch.no_grad():
            return model(x)
    except RuntimeError as error:
        return str(error)


def assert_alike(model, fused, inputs):
    for name, x in inputs.items():
        expected, found = outcome(model, x), outcome(fused, x)
        if isinstance(expected, str):
            assert found == expected, name
        else:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: name + text)


@pairwise(example=["contiguous", "channels last"], body=["conv", "norm", "none"], name=READERS)
def test_images_of_other_layouts(name, body, example):
    model = Images(READERS[name], body).eval()
    if isinstance(outcome(model, LAYOUTS[example]), str):
        return  # the original does not take the example
    fused = convert(model, LAYOUTS[example])
    assert_alike(model, fused, LAYOUTS)
    if body == "conv" and name in ("view", "split"):
        before = fused.kfconvert_info()["guard"]["hits"]
        assert_alike(model, fused, {"again": LAYOUTS[example], "fewer": LAYOUTS[example][:2]})
        assert fused.kfconvert_info()["guard"]["hits"] == before + 2


@pytest.mark.parametrize("name", ["view", "as_strided"])
def test_weights_of_another_layout(name):
    model = Images(READERS[name]).eval()
    fused = convert(model, X)
    for each in (model, fused):
        each.to(memory_format=torch.channels_last)
    assert_alike(model, fused, LAYOUTS)


VIEWS = {
    "joined": lambda x: x.view(-1, 16),
    "twice": lambda x: x.transpose(0, 1).transpose(0, 1).view(-1, 16),
    "the same": lambda x: x.view(x.shape[0], -1, 16),
    "behind a layer": lambda x: nn.functional.layer_norm(x, (16,)).view(-1, 16),
    "a sum by its memory": lambda x: (x + 1).as_strided((3, 5, 16), (80, 16, 1)),
}
SEQUENCES = {
    "contiguous": torch.randn(3, 5, 16),
    "transposed": torch.randn(5, 3, 16).transpose(0, 1),
    "slice": torch.randn(3, 9, 16)[:, :5],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs(name):
    model = Rows(VIEWS[name]).eval()
    fused = convert(model, SEQUENCES["contiguous"])
    assert_alike(model, fused, SEQUENCES)
    if name in ("behind contiguous", "the same", "behind a layer"):
        assert fused.kfconvert_info()["guard"] == {"hits": 3, "misses": {}}


class Product(nn.Module):
    """A view and a product that become one linear call."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return torch.relu(torch.addmm(self.bias, x.view(-1, 16), self.weight).view(x.shape))


CASES = {
    "behind fused modules": (Images(READERS["view"]), LAYOUTS),
    "of an input": (Rows(VIEWS["twice"]), SEQUENCES),
    "not there any more": (Product(), SEQUENCES),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stored_graph_fails_alike(name, tmp_path):
    model, inputs = CASES[name]
    fused = convert(model.eval(), inputs["contiguous"])
    save(fused, tmp_path / "saved")
    again = load(tmp_path / "saved", model=copy.deepcopy(model))
    assert_alike(model, again, inputs)
    assert again.kfconvert_info()["guard"]["hits"]
