"""Changes that a converted model need not detect, or does not before a refresh: docs/guide/limits.md.

``test_state_changes.py`` has the changes that it detects.
"""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter
from kfconvert.runtime import guarded_forward

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)
TABLE = {"scale": 1.0}
SETTINGS = types.SimpleNamespace(scale=1.0)


def scaled(x, factor=1.0):
    return x * factor


def times(number):
    return lambda x: x * number


by_closure = times(1.0)
CELL = by_closure.__closure__[0]


class Config:
    def __init__(self):
        self.gain, self.unread = 1.0, 1


class Act(nn.Module):
    def forward(self, x):
        return torch.relu(x)

    def unused(self, x):
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), Act(), nn.Linear(16, 8)
        self.shifts, self.unread, self.config = [0.0, 0.0], 1, Config()

    def forward(self, x):
        y = scaled(self.down(F.gelu(self.act(self.up(x))))) * self.config.gain + self.shifts[0]
        return by_closure(y) * TABLE["scale"] * SETTINGS.scale


def made():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def fused_once():
    return ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(made(), example_inputs=X)


def called(model):
    with torch.no_grad():
        return model(X)


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


def setting(name, value):
    return lambda model, patch: patch.setattr(model, name, value)


# What the program does not depend on.
INDIFFERENT = {
    "an attribute that the forward does not read": setting("unread", 2),
    "a setting that it does not read": lambda model, patch: setattr(model.config, "unread", 2),
    "a new attribute": lambda model, patch: setattr(model, "new", 2),
    "a method that it does not call": lambda model, patch: patch.setattr(Act, "unused", lambda self, x: x - 1),
    "an equal value": setting("shifts", [0.0, 0.0]),
}


@pytest.mark.parametrize("what", INDIFFERENT)
def test_the_program_goes_on(what, fused_once, monkeypatch):
    model, fused = made(), copy.deepcopy(fused_once)
    for each in (model, fused):
        INDIFFERENT[what](each, monkeypatch)
    before = hits(fused)
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == before + 1


# Fixed at conversion: other Python state that a forward finds in globals, closures and objects outside of the model.
FIXED = {
    "an item of a dict of its file": lambda patch: patch.setitem(TABLE, "scale", 2.0),
    "an attribute of an object of its file": lambda patch: patch.setattr(SETTINGS, "scale", 2.0),
    "a default of a function": lambda patch: patch.setattr(scaled, "__defaults__", (2.0,)),
    "a variable of a closure": lambda patch: patch.setattr(CELL, "cell_contents", 2.0),
}


@pytest.mark.parametrize("what", FIXED)
def test_other_state_is_fixed_until_a_refresh(what, fused_once, monkeypatch):
    model, fused = made(), copy.deepcopy(fused_once)
    expected = called(model)
    FIXED[what](monkeypatch)
    torch.testing.assert_close(called(fused), expected)
    assert hits(fused)
    fused.kfconvert_refresh()
    before = hits(fused)
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == before and "kfconvert_refresh" in str(fused.kfconvert_info()["guard"]["misses"])


def test_a_refresh_drops_a_program_that_raises(fused_once, monkeypatch):
    """An error of the program only; calls ran the original forward for it, each after a vain run of the program."""
    model, fused = made(), copy.deepcopy(fused_once)

    def failing(*inputs):
        raise RuntimeError("no kernel")

    program = guarded_forward(fused).variants[0].program
    monkeypatch.setattr(program, "code", failing)
    fused.kfconvert_refresh()
    torch.testing.assert_close(called(fused), called(model))
    assert "kfconvert_refresh found an error of the program" in str(fused.kfconvert_info()["guard"]["misses"])


class Spectrum(nn.Sequential):
    def forward(self, x):
        return torch.fft.rfft(super().forward(x))


def test_a_refresh_keeps_a_right_program_with_complex_outputs():
    """Its fused layers round otherwise than the original's."""
    torch.manual_seed(0)
    model = Spectrum(nn.Linear(8, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=X)
    fused.kfconvert_refresh()
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == 1 and not fused.kfconvert_info()["guard"]["misses"]
