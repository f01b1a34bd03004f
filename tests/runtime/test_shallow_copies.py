"""Shallow copies of a converted model, replicas, and modules that share its attributes or its forward."""

import copy
import types

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Other(Plain):
    def forward(self, x):
        return self.linear(x) - 1


def copied(source):
    return copy.copy(source)


def taken_over(source, kind=Plain, without=()):
    target = kind.__new__(kind)
    target.__dict__.update({name: value for name, value in vars(source).items() if name not in without})
    return target


COPIES = {
    "copy.copy": copied,
    "replica": lambda m: m._replicate_for_data_parallel(),
    "attributes": taken_over,
    "attributes of another class": lambda m: taken_over(m, Other),
    "some attributes": lambda m: taken_over(m, Other, ("kfconvert_info", "kfconvert_refresh")),
}


@pytest.mark.parametrize("way", COPIES)
@torch.no_grad()
def test_who_shares_the_attributes_of_a_converted_model(way):
    torch.manual_seed(0)
    model = Plain().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    linear = nn.Linear(8, 8)
    twins = [COPIES[way](each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": linear}
    torch.testing.assert_close(twins[1](X), twins[0](X))
    torch.testing.assert_close(fused(X), model(X))


@torch.no_grad()
def test_the_forward_of_a_shallow_copy_called_by_name():
    model = Plain().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    twins = [copy.copy(each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": nn.Identity()}
        assert torch.equal(twin.forward(X), torch.relu(X))
    assert not hasattr(twins[1], "kfconvert_info") and "__getstate__" not in vars(twins[1])
    assert hits(fused) == 0 and torch.allclose(fused(X), model(X), atol=1e-5) and hits(fused) == 1
    duplicate = copy.deepcopy(fused)
    assert torch.equal(duplicate(X), fused(X)) and hits(duplicate) == 2
    twin = copy.copy(duplicate)
    twin.__dict__["_modules"] = {"linear": nn.Identity()}
    assert torch.equal(twin.forward(X), torch.relu(X))


@torch.no_grad()
def test_a_shallow_copy_of_a_model_whose_forward_was_put_on_the_instance():
    model, fused = Plain().eval(), Plain().eval()
    fused.load_state_dict(model.state_dict())
    for each in (model, fused):
        each.forward = types.MethodType(lambda self, x: torch.sigmoid(self.linear(x)), each)
    fused = ModelConverter(select="all").convert_model(fused, example_inputs=X, inplace=True)
    twins = [copy.copy(each) for each in (model, fused)]
    for twin in twins:
        twin.__dict__["_modules"] = {"linear": nn.Identity()}
    for call in (lambda m: m(X), lambda m: m.forward(X)):
        torch.testing.assert_close(call(twins[1]), call(twins[0]))
        torch.testing.assert_close(call(fused), call(model))


class Pair(nn.Module):
    """Values decide, so that its parts are captured."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Plain(), Plain()

    def forward(self, x):
        y = self.first(x)
        return y if y.abs().max() > 1e9 else self.second(y)


@torch.no_grad()
def test_the_forward_of_one_part_assigned_to_another_of_its_class():
    model = Pair().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    assert fused.kfconvert_info()["parts"]
    for each in (model, fused):
        each.second.forward = each.first.forward
    torch.testing.assert_close(fused(X), model(X))


class Child(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.parents = [parent]

    def forward(self, x):
        return x * self.parents[0].scale


class Parent(nn.Module):
    """Its child refers to it without registering it."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0
        self.child = Child(self)

    def forward(self, x):
        return self.child(torch.relu(self.linear(x)))


@torch.no_grad()
def test_a_child_that_refers_to_its_parent():
    model = Parent().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    torch.testing.assert_close(fused(X), model(X))
    assert hits(fused) == 1
    for each in (model, fused):
        each.scale = 3.0
    torch.testing.assert_close(fused(X), model(X))


class Flat(nn.Module):
    """The weights of its layers are views of one parameter, and plain attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.flat = nn.LayerNorm(8), nn.Parameter(torch.randn(3 * 64 + 8))
        for index, layer in enumerate(self.layers):
            del layer.weight
            layer.weight = self.flat.detach()[64 * index : 64 * index + 64].view(8, 8)
        del self.norm.weight
        self.norm.weight = self.flat.detach()[192:]

    def forward(self, x):
        first, second, third = (layer(x) for layer in self.layers)
        return self.norm(torch.relu(first) * second + third)


@torch.no_grad()
def test_weights_that_are_plain_attributes():
    model = Flat().eval()
    fused = copy.deepcopy(model)
    for index, layer in enumerate(fused.layers):
        layer.weight = fused.flat.detach()[64 * index : 64 * index + 64].view(8, 8)
    fused.norm.weight = fused.flat.detach()[192:]
    fused = ModelConverter(select="all").convert_model(fused, example_inputs=X, inplace=True)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each.flat.mul_(2)
    torch.testing.assert_close(fused(X), model(X))
