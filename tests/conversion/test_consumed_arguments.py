"""Forwards that take away from what they are given: a conversion, which calls them many times, gives each its own."""

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")


class Batch:
    def __init__(self, x):
        self.held = [x]


TAKEN = {
    "dict": (lambda x: {"x": x, "y": x}, lambda given: given.pop("x")),
    "nested": (lambda x: {"inner": [{"x": x}]}, lambda given: given["inner"].pop().pop("x")),
    "object": (Batch, lambda given: given.held.pop()),
}


class Net(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.take, self.linear, self.norm = take, nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, batch):
        x = self.take(batch)
        return self.norm(x + nn.functional.gelu(self.linear(x)))


@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_what_a_forward_takes_away(name):
    make, take = TAKEN[name]
    model, x = Net(take).eval(), torch.randn(3, 8)
    example = make(x)
    converted = ModelConverter().convert_model(model, example_inputs=(example,), tune_for=[(example,)], profile=True)
    assert take(example) is x
    torch.testing.assert_close(converted(make(x)), model(make(x)))
