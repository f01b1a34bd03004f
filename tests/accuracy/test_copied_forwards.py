"""Models with forwards that refer to their modules are not copied: the copy would compute with the original."""

import pytest
import torch
from torch import nn

from kfconvert import ConversionError, ModelConverter
from kfconvert.accuracy import copied_model

X = torch.ones(2, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def wrapped(model):
    before = model.forward
    model.forward = lambda x: before(x) + 1


def wrapped_twice(model):
    wrapped(model)
    wrapped(model)


def of_modules(model):
    first = model.first
    model.forward = lambda x: model.second(first(x))


def of_tensors(model):
    weight = model.first.weight
    model.first.forward = lambda x: x @ weight


def by_default(model):
    def forward(x, layer=model.first, *, other=model.second):
        return other(layer(x))

    model.forward = forward


def of_itself(model):
    def forward(x, depth=2):
        return model.first(x) if depth == 0 else forward(x, depth - 1)

    model.forward = forward


@pytest.mark.parametrize("put", [wrapped, wrapped_twice, of_modules, of_tensors, by_default, of_itself])
def test_a_forward_that_would_compute_with_the_weights_of_the_original_is_refused(put):
    model = Net()
    put(model)
    with pytest.raises(TypeError, match="is a function that refers to modules of the model"):
        copied_model(model)
    with pytest.raises(ConversionError, match="refers to modules of the model.; pass inplace=True"):
        ModelConverter().convert_model(model, example_inputs=X)


def test_functions_that_hold_nothing_of_the_model_stay():
    model, factor = Net(), torch.ones(8)
    model.forward = lambda x: x * factor
    assert copied_model(model).forward is model.forward
