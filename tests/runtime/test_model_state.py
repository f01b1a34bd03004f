"""What a converted model notices of changes to itself, and what of its own doing it takes no offence at."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(16, 4)

    def forward(self, x, shift=None):
        return torch.relu(self.head(self.inner(x, shift)))


X = torch.randn(3, 16)


def convert(model):
    converter = ModelConverter(select="all")
    return converter.convert_model(model, input_shape=(3, 16)), converter.conversion_stats


def original(model, *args):
    with torch.no_grad():
        return type(model).forward(model, *args)


def counts(model):
    return model.kfconvert_info()["guard"]


def call(model, *args):
    with torch.no_grad():
        return model(*args)


class Config:
    attribute_map = {"width": "hidden_size"}

    def __init__(self):
        self.flag, self.unread, self.hidden_size = True, 1, 16

    def __getattribute__(self, name):
        names = object.__getattribute__(self, "attribute_map")
        return object.__getattribute__(self, names.get(name, name))


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, shift=None):
        self.config.last = x.shape
        y = torch.relu(self.linear(x)) / self.config.width
        return y if self.config.flag and not getattr(self.config, "extra", False) else -y


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_settings_that_the_forward_reads():
    fused, _ = convert(Outer(Configured()).eval())
    config = fused.inner.config
    assert type(config) is Config
    config.unread, config.note = 5, "new"  # other settings may change
    before = call(fused, X)
    assert counts(fused) == {"hits": 1, "misses": {}}
    for name, value in (("flag", False), ("hidden_size", 8), ("extra", True)):
        copied = copy.deepcopy(fused)
        setattr(copied.inner.config, name, value)
        after = call(copied, X)
        torch.testing.assert_close(after, original(copied, X))
        assert not torch.allclose(before, after)
        (reason,) = counts(copied)["misses"]
        assert f"{name} in the configuration" in reason


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x, shift=None):
        self.calls += 1
        return torch.relu(self.linear(x)) * (1.0 if self.calls < 100 else 2.0)


def test_a_forward_that_counts_its_calls_is_left_alone():
    fused, stats = convert(Outer(Counting()).eval())
    (root,) = (region for region in stats["regions"] if region["module"] == "")
    assert root["reason"] == "its forward changes inner.calls in every call"
    assert stats["total_replaced"] == 2  # both layers, each on its own
    for _ in range(100):
        last = call(fused, X)
    fused.inner.calls = 200
    torch.testing.assert_close(last, original(fused, X))


@torch.no_grad()
def test_a_forward_that_was_wrapped_and_put_back():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    fused = ModelConverter(select="all").convert_model(model, input_shape=(4, 8))
    x = torch.randn(4, 8)
    inner = fused[0]
    own = inner.forward
    inner.forward = lambda x: own(x) + 1
    with pytest.warns(RuntimeWarning, match="forward was replaced"):
        torch.testing.assert_close(fused(x), torch.relu(own(x) + 1))
    inner.forward = own
    for _ in range(2):
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["guard"]["hits"] == 2
    inner.forward = nn.Linear(8, 8).forward  # that of another instance
    torch.testing.assert_close(fused(x), torch.relu(inner.forward(x)))
    assert fused.kfconvert_info()["guard"]["hits"] == 2


def test_the_order_of_buffers_that_the_forward_goes_through():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.full((8,), 2.0))
            self.register_buffer("shift", torch.full((8,), 3.0))

        def forward(self, x):
            x = torch.relu(self.linear(x))
            for value in self.buffers():
                x = (x + value) * value
            return x

    x, model = torch.randn(4, 8), Net().eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=x)
    with torch.no_grad():
        before = fused(x)
        assert counts(fused)["hits"] == 1
        for each in (model, fused):
            each._buffers["scale"] = each._buffers.pop("scale")
        torch.testing.assert_close(fused(x), model(x))
    assert not torch.allclose(fused(x), before)
