"""Parameters and buffers of which a forward asks something else than their elements, with which it does not compute."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.unused, self.factor = nn.Linear(8, 8), nn.Linear(8, 8), factor
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.factor(self)


def plain_weight(model):
    del model.unused.weight
    model.unused.weight = torch.ones(8, 8)


CHANGES = {
    "shape of a buffer": (lambda m: m.table.shape[0], lambda m: setattr(m, "table", torch.ones(3))),
    "a buffer that is None": (lambda m: 5 if m.table is None else 1, lambda m: setattr(m, "table", None)),
    "shape of a weight": (
        lambda m: m.unused.weight.shape[0],
        lambda m: setattr(m.unused, "weight", nn.Parameter(torch.ones(4, 8))),
    ),
    "a bias that is None": (lambda m: 5 if m.unused.bias is None else 1, lambda m: setattr(m.unused, "bias", None)),
    "class of a weight": (lambda m: 1 if isinstance(m.unused.weight, nn.Parameter) else 5, plain_weight),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore:kfconvert")
@torch.no_grad()
def test_what_is_asked_of_a_tensor(name):
    factor, change = CHANGES[name]
    model = Net(factor).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), input_shape=(4, 8)
    )
    x = torch.randn(4, 8)
    assert torch.equal(fused(x), model(x)) and fused.kfconvert_info()["guard"]["hits"] == 1
    change(model), change(fused)
    torch.testing.assert_close(fused(x), model(x))


@torch.no_grad()
def test_another_of_the_same_kind_is_no_change():
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        Net(lambda m: m.table.shape[0]).eval(), input_shape=(4, 8)
    )
    for count in (1, 2, 3):
        fused.table = torch.randn(2)
        fused.unused.weight = nn.Parameter(torch.randn(8, 8))
        fused(torch.randn(4, 8))
        assert fused.kfconvert_info()["guard"] == {"hits": count, "misses": {}}
