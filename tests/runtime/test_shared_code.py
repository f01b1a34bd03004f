"""Layers of one structure are watched by one walk through their code; those whose code may differ are not."""

import torch
from torch import nn

from kfconvert.runtime.code_state import Codes
from kfconvert.runtime.holdings import Holdings

HELD = []
READS = frozenset[str]()


def plain(x):
    return x


def other(x):
    return -x


class Layer(nn.Module):
    def __init__(self, function=plain):
        super().__init__()
        self.inner, self.function = nn.Linear(2, 2), function

    def forward(self, x):
        return self.function(self.inner(x))


class Reaching(nn.Module):
    """Its code finds modules that are not registered in it; which of them are its own differs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return sum(module(x) for module in HELD)


def code_of(*modules):
    codes = Codes()
    return [codes.of(Holdings(module), READS, False) for module in modules]


def test_layers_of_one_structure_share_their_code():
    first, second = code_of(Layer(), Layer())
    assert first is second


def test_layers_with_other_functions_do_not():
    first, second, third = code_of(Layer(), Layer(other), Layer())
    assert first is third and first is not second


def test_layers_with_other_classes_within_do_not():
    layer = Layer()
    layer.inner = nn.Identity()
    first, second = code_of(Layer(), layer)
    assert first is not second


def test_code_that_meets_modules_is_not_shared(monkeypatch):
    layers = [Reaching(), Reaching()]
    monkeypatch.setitem(globals(), "HELD", [layers[0].inner])
    first, second = code_of(*layers)
    assert first is not second
    assert second.refusal(False) is None
    HELD[0] = nn.Linear(2, 2)
    assert second.refusal(False) is not None


def test_a_change_of_shared_code_is_noticed_by_all(monkeypatch):
    first, second = code_of(Layer(), Layer())
    assert first.refusal(False) is None
    monkeypatch.setattr(Layer, "forward", lambda self, x: torch.relu(x))
    assert first.refusal(False) is not None and second.refusal(False) is not None
