"""A program that computes on channels-last images returns the strides that the model returns."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(2, 16, 8, 8)


def with_view(y):
    return y, y.permute(0, 3, 1, 2).view(2, -1)


FORMS = {
    "an image": lambda y: y,
    "a view": lambda y: y.view(2, -1),
    "an image and a view of it": lambda y: (y, y.view(2, -1)),
    "values and indices": lambda y: F.max_pool2d(y, 2, return_indices=True),
    "chunks": lambda y: y.chunk(2, 1),
    "random numbers": torch.rand_like,
    "complex numbers": lambda y: torch.view_as_complex(y.view(2, 16, 8, 4, 2)),
    "strides": lambda y: torch.as_strided(y, (2, 8), (8, 1)),
    "a write by strides": lambda y: torch.as_strided_scatter(y, torch.zeros(2, 8), (2, 8), (8, 1)),
    "channels at the end": lambda y: y.permute(0, 2, 3, 1) * 2,
    "channels at the end and a view of them": lambda y: with_view(y.permute(0, 2, 3, 1) * 2),
    "tokens": lambda y: F.gelu(y.flatten(2).transpose(1, 2)),
}


class Net(nn.Module):
    def __init__(self, activation, form):
        super().__init__()
        self.conv, self.norm, self.activation = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), activation
        self.form = form

    def forward(self, x):
        return self.form(self.activation(self.norm(self.conv(x))))


def outputs(model, x):
    torch.manual_seed(0)
    with torch.no_grad():
        found = model(x)
    return found if isinstance(found, (tuple, list)) else (found,)


def memories(tensors):
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


# Each form has one of the activations, and an image has each.
ACTIVATIONS = nn.ReLU(), nn.ReLU(inplace=True), nn.Hardswish(inplace=True)
CASES = [*zip(FORMS, itertools.cycle(ACTIVATIONS)), *(("an image", activation) for activation in ACTIVATIONS[1:])]


@pytest.mark.parametrize(("form", "activation"), CASES)
def test_outputs_have_the_strides_of_the_model(form, activation):
    model = Net(activation, FORMS[form]).eval()
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=X)
    expected, actual = outputs(model, X), outputs(fused, X)
    torch.testing.assert_close(actual, expected)
    assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]
    assert memories(actual) == memories(expected)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


class Attending(nn.Module):
    """Without gradients, an operator of its own computes this, and lays it out otherwise than the one of the trace."""

    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(16, 4, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Normed(nn.Module):
    """The stand-in for a batch norm's result keeps the strides of its argument, which the result itself does not."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 1), nn.BatchNorm1d(16)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x).flatten(2)).view_as(x))


OTHERWISE = {
    "attention": (Attending(False), torch.randn(3, 5, 16)),
    "attention with weights": (Attending(True), torch.randn(3, 5, 16)),
    "a norm": (Normed(), X.contiguous(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("model, x", OTHERWISE.values(), ids=OTHERWISE)
def test_strides_that_differ_in_a_trace_are_those_of_the_model(model, x):
    model = model.eval().to(memory_format=torch.channels_last)
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=x)
    for given in (x, x[:2]):
        expected, actual = outputs(model, given), outputs(fused, given)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
        assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]
        assert memories(actual) == memories(expected)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}
