"""Caches that a forward fills: the stand-ins for tensors that a trace puts there are taken out again."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
CACHE = {}


def by_identity(module, x):
    weight = module.linear.weight
    if id(weight) not in CACHE:
        CACHE[id(weight)] = torch.tanh(weight)
    return CACHE[id(weight)]


def nested(module, x):
    weight = module.linear.weight
    return CACHE.setdefault("inner", {}).setdefault(type(weight), [torch.tanh(weight)])[0]


def own(module, x):
    weight = module.linear.weight
    return module.kept.setdefault(type(weight), torch.tanh(weight))


@functools.lru_cache(None)
def derived(weight):
    return torch.tanh(weight)


def enclosed():
    kept = {}

    def look_up(module, x):
        weight = module.linear.weight
        return kept.setdefault(type(weight), torch.tanh(weight))

    look_up.kept = kept
    return look_up


in_closure = enclosed()
FUNCTIONS = {
    "identity": lambda module, x: by_identity(module, x),
    "nested": lambda module, x: nested(module, x),
    "own": lambda module, x: own(module, x),
    "cached by weight": lambda module, x: derived(module.linear.weight),
    "closure": lambda module, x: in_closure(module, x),
}


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.kept, self.function = {}, FUNCTIONS[name]

    def forward(self, x):
        return self.norm(nn.functional.gelu(nn.functional.linear(x, self.function(self, x))))


def values(held):
    for value in held.values() if isinstance(held, dict) else held:
        yield from values(value) if isinstance(value, (dict, list)) else [value]


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_no_stand_in_stays(name):
    CACHE.clear(), in_closure.kept.clear(), derived.cache_clear()
    model = nn.Sequential(Layer(name), Layer(name)).eval()
    x = torch.randn(3, 8)
    expected = model(x)
    converted = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, example_inputs=(x,), inplace=True
    )
    held = [CACHE, in_closure.kept, *(layer.kept for layer in model)]
    assert not any(isinstance(value, FakeTensor) for value in values(held))
    torch.testing.assert_close(converted(x), expected)
