"""What is put into a class after a conversion, and comes before what the class had by that name from a base."""

import itertools
import types

import pytest
import torch
from support import small_models
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 8)


class Base:
    amount = 2.0

    def __init__(self):
        self.own = 2.0

    def factor(self):
        return 2.0

    @property
    def share(self):
        return 2.0

    @classmethod
    def of_class(cls):
        return cls.amount

    def __len__(self):
        return 2


class Middle(Base):
    """Without anything of its own."""


class OfModule(nn.Module, Base):
    def __init__(self):
        nn.Module.__init__(self)

    def forward(self, x):
        return x * self.factor() * self.share * self.amount * len(self) * self.of_class()


class New(Middle):
    def factor_of_super(self):
        return super().factor()


class Of:
    """Classes, of each of which nothing but one kind of object is there."""

    Object, Listed, Held = (type(name, (Middle,), {}) for name in ("Object", "Listed", "Held"))
    Act, Other = (type(name, (OfModule,), {}) for name in ("Act", "Other"))


OBJECT = Of.Object()
HELD = types.SimpleNamespace(inner=[Of.Listed()])
WAYS = {
    "a new object": lambda m, x: x * New().factor(),
    "a property": lambda m, x: x * New().share,
    "an attribute": lambda m, x: x * New().amount,
    "an attribute of the object": lambda m, x: x * New().own,
    "a special method": lambda m, x: x * len(New()),
    "of super": lambda m, x: x * New().factor_of_super(),
    "of the class": lambda m, x: x * New.factor(None),
    "an attribute of the class": lambda m, x: x * New.amount,
    "within a class method": lambda m, x: x * New.of_class(),
    "by name": lambda m, x: x * getattr(New(), "factor")(),  # noqa: B009  # the way that is tested
    "of a global object": lambda m, x: x * OBJECT.factor(),
    "of an object in a list": lambda m, x: x * HELD.inner[0].factor(),
    "of an attribute": lambda m, x: x * m.held.factor(),
    "of a module": lambda m, x: m.act(x),
    "of a module in a list": lambda m, x: m.listed[0](x),
    "of the model": lambda m, x: x * m.factor(),
}


class Net(OfModule):
    def __init__(self, way):
        super().__init__()
        self.linear, self.way, self.held, self.act = nn.Linear(8, 8), way, Of.Held(), Of.Act()
        self.listed = [Of.Other()]

    def forward(self, x):
        return WAYS[self.way](self, torch.relu(self.linear(x)))


def of_three(self):
    self.own = 3.0


PUT = {
    "__init__": of_three,
    "factor": lambda self: 3.0,
    "amount": 3.0,
    "share": property(lambda self: 3.0),
    "__len__": lambda self: 3,
}


OWNERS = (Middle, OfModule, New, Of.Object, Of.Listed, Of.Held, Of.Act, Of.Other, Net)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_it_is_used(monkeypatch, way):
    original = Net(way).eval()
    fused = small_models.convert(original, example_inputs=X)
    before, used = fused(X), set()
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    for owner, (name, value) in itertools.product(OWNERS, PUT.items()):
        if name == "__init__" and issubclass(owner, nn.Module):
            continue
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value, raising=False)
            wanted = original(X)
            assert torch.equal(fused(X), wanted), (owner, name)
            used |= set() if torch.equal(wanted, before) else {name}
    assert used and torch.equal(fused(X), before)
