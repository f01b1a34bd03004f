"""Copies of models with forwards that somebody has put on their modules compute with weights of their own."""

import pytest
import torch
from torch import nn

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
def test_a_copy_computes_with_its_own_weights(put):
    torch.manual_seed(0)
    model = Net()
    put(model)
    before, made = model(X), copied_model(model)
    assert torch.equal(made(X), before)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
        changed = made(X)
        assert torch.equal(model(X), before) and not torch.equal(changed, before)
        for parameter in model.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(model(X), changed)
