"""Attributes that are put into an instance after a conversion, for which its forward had asked in vain; also such as
have the names of methods."""

import types

import pytest
import torch
from support import small_models
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 8)
# In the forward, ``h`` is what the attribute is put into.
ASKED = {
    "in the dict": lambda h: h.__dict__["extra"] if "extra" in h.__dict__ else 2.0,
    "of the dict": lambda h: h.__dict__.get("extra", 2.0),
    "of vars()": lambda h: vars(h).get("extra", 2.0),
    "with a default": lambda h: getattr(h, "extra", 2.0),
    "whether it is there": lambda h: h.extra if hasattr(h, "extra") else 2.0,
    "all of them": lambda h: sum(value for value in vars(h).values() if type(value) is float) + 2.0,
}


class Act(nn.Module):
    def forward(self, x, ask):
        return x * ask(self)


class Plain:
    def __init__(self):
        self.one = 1


OBJECT = types.SimpleNamespace(one=1)
PLAIN = Plain()


class Net(nn.Module):
    def __init__(self, ask, where):
        super().__init__()
        self.linear, self.act, self.listed, self.ask, self.where = nn.Linear(8, 8), Act(), [Act()], ASKED[ask], where
        self.held, self.objects = types.SimpleNamespace(one=1), [types.SimpleNamespace(one=1)]
        self.plain, self.plains = Plain(), [Plain()]

    def forward(self, x):
        x = torch.relu(self.linear(x))
        if isinstance(holder := HOLDERS[self.where](self), Act):
            return holder(x, self.ask)
        return x * self.ask(holder)


HOLDERS = {
    "the model": lambda m: m,
    "a submodule": lambda m: m.act,
    "a module in a list": lambda m: m.listed[0],
    "an object": lambda m: m.held,
    "an object in a list": lambda m: m.objects[0],
    "a global object": lambda m: OBJECT,
    "an object of a class": lambda m: m.plain,
    "an object of a class in a list": lambda m: m.plains[0],
    "a global object of a class": lambda m: PLAIN,
}
OF_A_CLASS = [where for where in HOLDERS if "class" in where or "model" in where or "module" in where]


CASES = [(ask, where) for where in ("the model", "a global object") for ask in ASKED]
CASES += [(ask, where) for where in HOLDERS for ask in ("in the dict", "with a default") if (ask, where) not in CASES]


@pytest.mark.parametrize(("ask", "where"), CASES)
@torch.no_grad()
def test_it_is_used(monkeypatch, ask, where):
    original = Net(ask, where).eval()
    fused = small_models.convert(original, example_inputs=X)
    before = fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    for each in (original, fused):
        monkeypatch.setattr(HOLDERS[where](each), "extra", 3.0, raising=False)
    wanted = original(X)
    assert torch.equal(fused(X), wanted) and not torch.equal(wanted, before)


@pytest.mark.parametrize("where", OF_A_CLASS)
@torch.no_grad()
def test_it_is_used_where_the_class_has_it(monkeypatch, where):
    original = Net("with a default", where).eval()
    fused = small_models.convert(original, example_inputs=X)
    before = fused(X)
    monkeypatch.setattr(type(HOLDERS[where](original)), "extra", 3.0, raising=False)
    wanted = original(X)
    assert torch.equal(fused(X), wanted) and not torch.equal(wanted, before)


class Named(nn.Module):
    """Its attribute hides a method of every module."""

    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name
        setattr(self, name, 2.0)

    def forward(self, x):
        return torch.relu(self.linear(x)) * (getattr(self, self.name) if self.name == "half" else self.type)


@pytest.mark.parametrize("name", ["half", "type"])
@torch.no_grad()
def test_an_attribute_with_the_name_of_a_method_may_change(name):
    original = Named(name).eval()
    fused = small_models.convert(original, example_inputs=X)
    before = fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    for each in (original, fused):
        setattr(each, name, 3.0)
    wanted = original(X)
    assert torch.equal(fused(X), wanted) and not torch.equal(wanted, before)
