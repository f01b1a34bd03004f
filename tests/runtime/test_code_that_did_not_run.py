"""Methods of a model's modules that its forward names, but has not called: what they depend on may change."""

import pytest
import torch
from support import small_models
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 8)
STATE = {}
OF_CLASS = {}


def of_state(x):
    return x * (2.0 if STATE != {} else 1.0)


class Base(nn.Module):
    def __init__(self, way=None):
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way

    @property
    def loss(self):
        return of_state

    def scaled(self, x):
        return of_state(x)

    def __getitem__(self, x):
        return of_state(x)

    def forward(self, x, labels=None):
        y = torch.relu(self.linear(x))
        return y if labels is None else self.loss(y.float() - self.scaled(labels))

    def float(self):
        return of_state(super().float())


class Net(Base):
    def scaled(self, x):
        return x

    def forward(self, x, labels=None):
        y = super().forward(x, labels)
        if self.way == "of the instance":
            return Base.scaled(self, y)
        return CALLS[self.way](self, y)

    @classmethod
    def of_class(cls, x):
        return cls.by_class(x)

    @staticmethod
    def by_class(x):
        return x * (2.0 if OF_CLASS != {} else 1.0)

    def of_base(self, x):
        return super().scaled(x)

    def of_property(self, x):
        return super().loss(x)


CALLS = {
    "of super": Net.of_base,
    "a property of super": Net.of_property,
    "a property": lambda self, x: self.loss(x),
    "of the class": lambda self, x: type(self).__mro__[-3].scaled(self, x),
    "the property of the class": lambda self, x: Base.loss.fget(self)(x),
    "of the class of a class method": lambda self, x: self.of_class(x),
    "by an operator": lambda self, x: self[x],
}


def converted(monkeypatch, model):
    monkeypatch.setattr(f"{__name__}.STATE", {})
    monkeypatch.setattr(f"{__name__}.OF_CLASS", {})
    model.eval()
    return model, small_models.convert(model, example_inputs=X)


def test_what_they_read_may_change(monkeypatch):
    original, fused = converted(monkeypatch, Base())
    STATE["device"] = "cpu"
    assert torch.equal(fused(X), original(X))
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}


def test_those_that_it_names_only_may_be_replaced_by_others(monkeypatch):
    _, fused = converted(monkeypatch, Base())
    monkeypatch.setattr(f"{__name__}.of_state", lambda x: x)
    fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}


@pytest.mark.parametrize("way", ["of the instance", *CALLS])
def test_those_that_ran_are_watched_in_whatever_way_they_were_found(monkeypatch, way):
    original, fused = converted(monkeypatch, Net(way))
    before = fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    (OF_CLASS if way == "of the class of a class method" else STATE)["device"] = "cpu"
    assert torch.equal(fused(X), original(X))
    assert torch.allclose(fused(X), before * 2)


class Holder(nn.Module):
    """With a module that is not registered, and so is not recorded while it is traced."""

    def __init__(self, other):
        super().__init__()
        self.linear, self.held, self.other = nn.Linear(8, 8), [Scaling()], other

    def forward(self, x):
        return self.held[0](torch.relu(self.linear(x)))


class Scaling(nn.Module):
    def scaled(self, x):
        return of_state(x)

    def forward(self, x):
        return self.scaled(x)


@pytest.mark.parametrize("other", [nn.ReLU, Scaling])
def test_methods_of_modules_in_a_list_are_watched(monkeypatch, other):
    original, fused = converted(monkeypatch, Holder(other()))
    before = fused(X)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    STATE["device"] = "cpu"
    assert torch.equal(fused(X), original(X))
    assert torch.allclose(fused(X), before * 2)
