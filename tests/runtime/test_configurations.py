"""Configurations of models, as objects and as dicts: what the forward has read of them counts, and nothing else."""

import collections
import copy
import types

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 16)


class FrozenDict(collections.OrderedDict):
    """As in diffusers: items that are attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self).update(self)


class Configured(nn.Module):
    def __init__(self, config, read):
        super().__init__()
        self._config, self.read, self.linear = config, read, nn.Linear(16, 16)

    @property
    def config(self):
        return self._config

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.read(self.config)


def made(config, read):
    torch.manual_seed(0)
    model = Configured(config, read).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), example_inputs=X
    )
    assert is_served(fused)
    return model, fused


def is_served(fused):
    before = fused.kfconvert_info()["guard"]["hits"]
    with torch.no_grad():
        fused(X)
    return fused.kfconvert_info()["guard"]["hits"] == before + 1


def set_both(model, name, value):
    dict.__setitem__(model._config, name, value)
    vars(model._config)[name] = value


VALUES = {"scale": 2.0, "names": ["a", "b"], "unread": 1, "_version": "1"}
READS = {"attribute": lambda c: c.scale, "items": lambda c: c["scale"] * c.get("absent", len(list(c.items())))}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_of_a_dict_everything_counts_but_metadata(read):
    model, fused = made(FrozenDict(VALUES), read)
    set_both(fused, "_version", "2")  # as save_config of diffusers does
    assert is_served(fused)
    fused._config = FrozenDict(fused._config)  # as register_to_config does
    assert is_served(fused) and is_served(copy.deepcopy(fused))
    for each in (model, fused):
        set_both(each, "scale", 3.0)
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))
    for each in (model, fused):
        each._config = FrozenDict({**each._config, "scale": 2.0, "absent": 5.0})
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))


def test_what_an_item_holds_counts():
    model, fused = made(FrozenDict(VALUES), lambda c: c.scale * len(c.names))
    for each in (model, fused):
        each._config["names"].append("c")
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))


class Settings:
    def __init__(self, scale, unread, inner=None):
        self.scale, self.unread, self.inner = scale, unread, inner


class Mapped:
    """As in transformers: a setting with two names."""

    attribute_map = {"scale": "factor"}

    def __init__(self):
        self.factor = 2.0

    def __getattribute__(self, name):
        names = object.__getattribute__(self, "attribute_map")
        return object.__getattribute__(self, names.get(name, name))


def test_a_setting_that_is_read_under_another_name():
    model, fused = made(Mapped(), lambda c: c.scale * (2.0 if getattr(c, "extra", False) else 1.0))
    for name, value in (("factor", 3.0), ("extra", True)):
        for each in (model, fused):
            setattr(each._config, name, value)
        with torch.no_grad():
            torch.testing.assert_close(fused(X), model(X))


@pytest.mark.parametrize("other", [Settings(2.0, 1, Settings(4.0, 1)), types.SimpleNamespace(scale=5.0, inner=None)])
def test_another_object_is_a_change(other):
    read = lambda c: c.scale * (c.inner.scale if c.inner else 1.0)  # noqa: E731
    model, fused = made(Settings(2.0, 1, Settings(3.0, 1)), read)
    for each in (model, fused):
        each._config = other
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))
