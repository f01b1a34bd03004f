"""Which changes after the conversion a converted model detects, and which it does not: docs/guide/limits.md."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)
TABLE = {"scale": 1.0}
SETTINGS = types.SimpleNamespace(scale=1.0)
FACTOR = 1.0


def scaled(x, factor=1.0):
    """A helper in the file of the model, as ``apply_rotary_pos_emb`` is."""
    return x * factor * inner_factor()


def inner_factor():
    return FACTOR


def times(number):
    return lambda x: x * number


by_closure = times(1.0)
CELL = by_closure.__closure__[0]


class Act(nn.Module):
    def forward(self, x):
        return torch.relu(x)

    def unused(self, x):
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), Act(), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.5)
        self.scale, self.shifts, self.options = 1.0, [0.0, 0.0], {"power": 1}
        self.function = F.gelu
        self.config = types.SimpleNamespace(gain=1.0, nested=types.SimpleNamespace(gain=1.0))
        self.unread = 1

    def tail(self, x):
        return self.dropout(x) + self.shifts[0]

    def forward(self, x):
        y = self.down(F.gelu(self.act(self.up(x)))) * self.scale * self.config.gain * self.config.nested.gain
        y = self.tail(scaled(y)) ** self.options["power"]
        return by_closure(self.function(y)) * TABLE["scale"] * SETTINGS.scale


def made():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def fused_once():
    return ModelConverter(select="all").convert_model(made(), example_inputs=X)


def setting(path, name, value):
    return lambda model, patch: patch.setattr(model.get_submodule(path), name, value)


def of_function(function, name, value):
    return lambda model, patch: patch.setattr(function, name, value)


def own_forward(model, patch):
    model.act.forward = lambda x: x - 1


def hooked(model, patch):
    model.act.register_forward_hook(lambda module, args, output: output * 2)


def hook_of_all(model, patch):
    kept = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    patch.callback(kept.remove)


# Each change is made to the original and to the converted model; the converted model runs its original forward then.
DETECTED = {
    "an attribute": setting("", "scale", 2.0),
    "an item of a list": lambda model, patch: model.shifts.__setitem__(0, 1.0),
    "an item of a dict": lambda model, patch: model.options.update(power=2),
    "a configuration": lambda model, patch: setattr(model.config, "gain", 3.0),
    "a configuration within": lambda model, patch: setattr(model.config.nested, "gain", 3.0),
    "a function that it holds": setting("", "function", torch.tanh),
    "another submodule": setting("", "act", nn.Tanh()),
    "a forward of the instance": own_forward,
    "the forward of a class": lambda model, patch: patch.setattr(Act, "forward", lambda self, x: x - 1),
    "a method of a class": lambda model, patch: patch.setattr(Net, "tail", lambda self, x: x - 1),
    "the forward of a layer of torch": lambda model, patch: patch.setattr(
        nn.Linear, "forward", lambda m, x: x @ m.weight.t()
    ),
    "a function of its file": lambda model, patch: patch.setitem(globals(), "scaled", lambda x: x * 2),
    "a function that this calls": lambda model, patch: patch.setitem(globals(), "inner_factor", lambda: 2.0),
    "a number of its file": lambda model, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "the code of a function": of_function(inner_factor, "__code__", (lambda: 2.0).__code__),
    "a function of torch": lambda model, patch: patch.setattr(F, "gelu", lambda x: x * 2),
    "a hook": hooked,
    "train mode of a part": lambda model, patch: model.dropout.train(),
}


class Patches:
    """``monkeypatch`` that also undoes what has a function for that."""

    def __init__(self, monkeypatch):
        self.setattr, self.setitem, self._undo = monkeypatch.setattr, monkeypatch.setitem, []

    def callback(self, undo):
        self._undo.append(undo)

    def close(self):
        for undo in self._undo:
            undo()


@pytest.fixture
def patch(monkeypatch):
    patches = Patches(monkeypatch)
    yield patches
    patches.close()


def called(model):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(X)


def hits(model):
    return model.kfconvert_info()["guard"]["hits"]


@pytest.mark.parametrize("what", [*DETECTED, "a hook of all modules"])
def test_a_change_is_detected(what, fused_once, patch):
    model, fused = made(), copy.deepcopy(fused_once)
    torch.testing.assert_close(called(fused), called(model))
    before = hits(fused)
    for each in (model, fused) if what in DETECTED else (model,):
        DETECTED.get(what, hook_of_all)(each, patch)
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == before


# What the program does not depend on.
INDIFFERENT = {
    "an attribute that the forward does not read": setting("", "unread", 2),
    "a method that it does not call": lambda model, patch: patch.setattr(Act, "unused", lambda self, x: x - 1),
    "an equal value": setting("", "shifts", [0.0, 0.0]),
    "weights": lambda model, patch: model.up.weight.data.mul_(2),
    "a state dict": lambda model, patch: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
}


@pytest.mark.parametrize("what", INDIFFERENT)
def test_the_program_goes_on(what, fused_once, patch):
    model, fused = made(), copy.deepcopy(fused_once)
    for each in (model, fused):
        INDIFFERENT[what](each, patch)
    fused.kfconvert_refresh()
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
def test_other_state_is_fixed_until_a_refresh(what, fused_once, patch):
    model, fused = made(), copy.deepcopy(fused_once)
    expected = called(model)
    FIXED[what](patch)
    torch.testing.assert_close(called(fused), expected)
    assert hits(fused)
    fused.kfconvert_refresh()
    before = hits(fused)
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == before and "kfconvert_refresh" in str(fused.kfconvert_info()["guard"]["misses"])


class Spectrum(nn.Sequential):
    def forward(self, x):
        return torch.fft.rfft(super().forward(x))


def test_a_refresh_keeps_a_right_program_with_complex_outputs():
    """Its fused layers round otherwise than the original's."""
    torch.manual_seed(0)
    model = Spectrum(nn.Linear(8, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X)
    fused.kfconvert_refresh()
    torch.testing.assert_close(called(fused), called(model))
    assert hits(fused) == 1 and not fused.kfconvert_info()["guard"]["misses"]
