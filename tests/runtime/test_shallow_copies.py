"""Shallow copies of a converted model, replicas for DataParallel, and modules that share its forward or weights."""

import copy

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
