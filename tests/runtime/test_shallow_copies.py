"""Shallow copies of a converted model, replicas for DataParallel, and modules that share its forward or weights."""

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


COPIES = {"copy.copy": copy.copy, "replica": lambda model: model._replicate_for_data_parallel()}


@pytest.mark.parametrize("way", COPIES)
@torch.no_grad()
def test_a_shallow_copy_runs_the_original(way):
    model = Plain().eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=X)
    duplicate = copy.deepcopy(fused)
    for source in (model, fused, duplicate):
        twin = COPIES[way](source)
        twin.__dict__["_modules"] = {"linear": nn.Identity()}
        assert torch.equal(twin.forward(X), torch.relu(X)) and torch.equal(twin(X), torch.relu(X))
        added = vars(twin).keys() - vars(COPIES[way](model)).keys()
        assert not added
    for each in (fused, duplicate):
        torch.testing.assert_close(each(X), model(X))
        assert hits(each) == 1


@pytest.mark.parametrize("way", COPIES)
@torch.no_grad()
def test_a_shallow_copy_of_a_model_whose_forward_was_put_on_the_instance(way):
    model, fused = Plain().eval(), Plain().eval()
    fused.load_state_dict(model.state_dict())
    for each in (model, fused):
        each.forward = types.MethodType(lambda self, x: torch.sigmoid(self.linear(x)), each)
    fused = ModelConverter(select="all", effort="fast").convert_model(fused, example_inputs=X, inplace=True)
    twins = [COPIES[way](each) for each in (model, fused)]
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
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=X)
    assert fused.kfconvert_info()["parts"]
    for each in (model, fused):
        each.second.forward = each.first.forward
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
    fused = ModelConverter(select="all", effort="fast").convert_model(fused, example_inputs=X, inplace=True)
    torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each.flat.mul_(2)
    torch.testing.assert_close(fused(X), model(X))
