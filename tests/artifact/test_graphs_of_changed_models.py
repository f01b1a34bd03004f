"""Stored graphs are not used for a model in which values have changed places, or stand in another order."""

import enum
import functools
import types

import pytest
import torch
from torch import nn

from kfconvert.artifact import files as artifact
from kfconvert.converter import ModelConverter


class Settings:
    def __init__(self, factor):
        self.factor = factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Net(nn.Module):
    """What it computes with the ``stages`` depends on their order."""

    def __init__(self, stages):
        super().__init__()
        self.linear, self.stages = nn.Linear(8, 8), stages

    def forward(self, x):
        x = torch.relu(self.linear(x))
        for stage in self.stages:
            if callable(stage):
                x = stage(x) + 1
            else:
                factor = stage.factor if hasattr(stage, "factor") else stage["factor" if isinstance(stage, dict) else 0]
                x = (x + factor) * factor
        return x


def times(factor):
    return lambda x: x * factor


def made_class(factor):
    return type("Made", (Settings,), {"__init__": lambda self: None, "factor": factor})()


HOLDERS = {
    "lists": lambda factor: [factor],
    "lists within lists": lambda factor: [[factor][0], [factor]],
    "dicts": lambda factor: {"factor": factor},
    "objects": Settings,
    "objects with slots": Slotted,
    "namespaces": lambda factor: types.SimpleNamespace(factor=factor),
    "closures": times,
    "defaults": lambda factor: lambda x, factor=factor: x * factor,
    "partial functions": lambda factor: functools.partial(torch.mul, other=factor),
    "classes": made_class,
}


def saved(model, tmp_path):
    x = torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast").convert_model(model.eval(), example_inputs=x)
    return artifact.save(fused, tmp_path / "net"), x


def assert_loads_as(model, path, x):
    """The model with the weights of the artifact computes what it does loaded."""
    loaded = artifact.load(path, model=model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), type(model).forward(model, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_values_that_have_changed_places(tmp_path, make):
    path, x = saved(Net([make(2.0), make(3.0)]), tmp_path)
    assert_loads_as(Net([make(3.0), make(2.0)]), path, x)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.tail(torch.relu(self.linear(x)))


class Doubling:
    def factor(self):
        return 2.0


class Tripling:
    def factor(self):
        return 3.0


def with_bases(first):
    class Net(Base, *((Doubling, Tripling) if first else (Tripling, Doubling))):
        def tail(self, x):
            return x * self.factor()

    return Net()


def with_bases_within(first):
    class Inner(nn.Identity, *((Doubling, Tripling) if first else (Tripling, Doubling))):
        def forward(self, x):
            return x * self.factor()

    class Net(Base):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def tail(self, x):
            return self.inner(x)

    return Net()


def with_attributes(first):
    class Net(Base):
        def __init__(self):
            super().__init__()
            held = {"a": 2.0, "b": 3.0}
            self.options = types.SimpleNamespace(**(held if first else dict(reversed(held.items()))))

        def tail(self, x):
            for value in vars(self.options).values():
                x = (x + value) * value
            return x

    return Net()


def with_members(first):
    steps = enum.Enum("Steps", {"A": 2.0, "B": 3.0} if first else {"B": 3.0, "A": 2.0})

    class Net(Base):
        def tail(self, x):
            for step in steps:
                x = (x + step.value) * step.value
            return x

    return Net()


def with_annotations(first):
    def told(x: "double" if first else "triple"):  # noqa: F821  # read as a text
        return x

    class Net(Base):
        def tail(self, x):
            return x * (2.0 if told.__annotations__["x"] == "double" else 3.0)

    told.__annotations__["x"] = "double" if first else "triple"
    return Net()


@pytest.mark.parametrize("make", [with_bases, with_bases_within, with_attributes, with_members, with_annotations])
def test_what_stands_in_another_order(tmp_path, make):
    path, x = saved(make(True), tmp_path)
    assert_loads_as(make(False), path, x)
