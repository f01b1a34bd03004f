"""Stored graphs are not used for a model in which values have changed places, or stand in another order."""

import enum
import functools
import types

import pytest
import torch
from torch import nn

from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.converter import ModelConverter


class Settings:
    def __init__(self, factor):
        self.factor = factor


class Net(nn.Module):
    """What it computes with the ``stages`` depends on their order."""

    def __init__(self, stages):
        super().__init__()
        self.linear, self.stages = nn.Linear(8, 8), stages

    def forward(self, x):
        x, found = torch.relu(self.linear(x)), []
        for stage in self.stages:
            if callable(stage):
                found.append(stage(x) + 1)
            else:
                factor = stage.factor if hasattr(stage, "factor") else stage["factor" if isinstance(stage, dict) else 0]
                found.append((x + factor) * factor)
        return torch.stack(found)


HOLDERS = {
    "lists": lambda factor: [factor],
    "dicts": lambda factor: {"factor": factor},
    "objects": Settings,
    "partial functions": lambda factor: functools.partial(torch.mul, other=factor),
}


def saved(model, tmp_path):
    x = torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast").convert_model(model.eval(), example_inputs=x)
    return saving.save(fused, tmp_path / "net"), x


def assert_loads_as(model, path, x):
    """The model with the weights of the artifact computes what it does loaded."""
    loaded = artifact.load(path, model=model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), type(model).forward(model, x), rtol=1e-5, atol=1e-5)


def stages_of(swapped=None, shared=None):
    """Two values in holders of each kind, and the first in a third place. The values of one kind differ."""
    stages = []
    for name, make in HOLDERS.items():
        pair = [make(2.0), make(3.0)]
        stages += reversed(pair) if name == swapped else pair
        stages.append(pair[1] if name == shared else pair[0])
    return stages


@pytest.fixture(scope="module")
def with_holders(tmp_path_factory):
    path, x = saved(Net(stages_of()), tmp_path_factory.mktemp("saved"))
    assert (path / "graphs.json").exists()
    return path, x


@pytest.mark.parametrize("name", HOLDERS)
def test_values_that_have_changed_places(with_holders, name):
    assert_loads_as(Net(stages_of(swapped=name)), *with_holders)


@pytest.mark.parametrize("name", HOLDERS)
def test_places_that_share_one_value(with_holders, name):
    """What is there is the same, and so are the kinds of what stands at the places."""
    assert_loads_as(Net(stages_of(shared=name)), *with_holders)


class InOrder(nn.Module):
    """Holds its registered submodules, or their forwards, in a list as well."""

    def __init__(self, first, bound=False):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.order = [self.a, self.b] if first else [self.b, self.a]
        self.order = [each.forward for each in self.order] if bound else self.order

    def forward(self, x):
        for each in self.order:
            x = torch.relu(each(x))
        return x


@pytest.mark.parametrize("bound", [False, True])
def test_registered_modules_in_another_order(tmp_path, bound):
    path, x = saved(InOrder(True, bound), tmp_path)
    assert_loads_as(InOrder(False, bound), path, x)


class Number(float):
    pass


def level(value):
    return enum.IntEnum("Level", {"A": value, "B": 9}).A


VALUES = {"a float": (Number(2.0), Number(3.0)), "a member": (level(2), level(3))}


class Scaled(nn.Module):
    def __init__(self, changed=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factors = [after if name == changed else before for name, (before, after) in VALUES.items()]

    def forward(self, x):
        x = torch.relu(self.linear(x))
        for factor in self.factors:
            x = x * factor
        return x


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return saved(Scaled(), tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("name", VALUES)
def test_another_value_of_a_class_that_is_derived(scaled, name):
    assert_loads_as(Scaled(name), *scaled)


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


class Table(Base):
    """Makes a table for all at its first call, and counts it."""

    table, made = None, 0

    def tail(self, x):
        if Table.table is None:
            Table.table, Table.made = torch.linspace(1, 2, 8), 1
        return x * Table.table * Table.made


def test_what_a_first_call_leaves_in_a_class_is_not_of_a_trace(tmp_path):
    """Where it is loaded in a process in which it has not run."""
    path, x = saved(Table(), tmp_path)
    Table.table, Table.made = None, 0
    loaded = artifact.load(path, model=Table())
    assert type(Table.table) is torch.Tensor
    with torch.no_grad():
        assert type(loaded(x)) is torch.Tensor
    assert loaded.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    Table.table = None


@pytest.mark.parametrize("make", [with_bases, with_attributes])
def test_what_stands_in_another_order(tmp_path, make):
    path, x = saved(make(True), tmp_path)
    assert_loads_as(make(False), path, x)
