"""The order in which a forward meets attributes, parameters and the like is watched, as what they hold is."""

import copy
import types

import pytest
import torch
from torch import nn

from kfconvert.converter import ModelConverter


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(8, 8), 2.0, 3.0
        self.options = types.SimpleNamespace(a=2.0, b=3.0)
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("shift", torch.full((8,), 3.0))

    def forward(self, x):
        x = torch.relu(self.linear(x))
        for value in self.values():
            x = (x + value) * value
        return x


class OfObjects(Net):
    def values(self):
        return vars(self.options).values()


class OfModules(Net):
    def values(self):
        return [value for value in vars(self).values() if isinstance(value, float)]


class OfBuffers(Net):
    def values(self):
        return self.buffers()


def move(holder, name):
    """Lets the attribute come last."""
    value = getattr(holder, name)
    delattr(holder, name)
    setattr(holder, name, value)


def move_buffer(model):
    value = model.scale
    del model.scale
    model.register_buffer("scale", value)


MOVES = {
    OfObjects: lambda model: move(model.options, "a"),
    OfModules: lambda model: move(model, "first"),
    OfBuffers: move_buffer,
}


@pytest.mark.parametrize("copied", [False, True], ids=["", "a copy"])
@pytest.mark.parametrize("kind", MOVES)
def test_what_is_put_into_another_order(kind, copied):
    x, original = torch.randn(4, 8), kind().eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(original, example_inputs=x)
    fused = copy.deepcopy(fused) if copied else fused
    with torch.no_grad():
        before = fused(x)
        assert fused.kfconvert_info()["guard"]["hits"] > 0
        for model in (original, fused):
            MOVES[kind](model)
        torch.testing.assert_close(fused(x), original(x))
    assert not torch.allclose(fused(x), before)
