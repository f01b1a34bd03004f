"""What share of a forward each module takes, and what share is fused; by a clock that counts what it times."""

import itertools

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ModelConverter
from kfconvert.capture import Clock

X = torch.randn(3, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LogSoftmax(-1)

    def forward(self, x):
        return self.norm(torch.relu(self.linear(x)))


class Net(nn.Module):
    def __init__(self, asks=False):
        super().__init__()
        self.block, self.head, self.asks = Block(), nn.Linear(8, 8), asks

    def forward(self, x):
        x = self.block(x) if not self.asks or float(x.sum()) < 1e6 else x
        return self.head(x).cos().sin()


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch):
    """A second passes each time that somebody asks what time it is."""
    seconds = itertools.count()
    monkeypatch.setattr(Clock, "now", lambda self: next(seconds))


def profiled(model, **options):
    converter = ModelConverter(select="all", effort="fast", **options)
    converted = converter.convert_model(model.eval(), example_inputs=X, profile=True)
    return converted, converter


def test_modules_and_operators_are_counted_and_nothing_is_left_in_the_model(tmp_path):
    model = Net()
    converted, converter = profiled(model)
    found = converter.conversion_stats["time_shares"]
    # Between its begin and its end, each of the 5 modules asks twice.
    assert found["milliseconds"] == 9000
    expected = {"": 1, "block": 5 / 9, "block.linear": 1 / 9, "block.norm": 1 / 9, "head": 1 / 9}
    assert found["modules"] == pytest.approx(expected, abs=1e-4)
    # Of linear, relu, log_softmax, linear, cos and sin.
    assert found["fused"] == pytest.approx(3 / 6)
    explanation = str(converter.explain())
    assert "of 9000.00 ms of the original's forward, 50 % is in sites that can be fused" in explanation
    assert "head  Linear  linear: fits (kernel)  11 % of the time" in explanation
    assert "slowest: block.norm LogSoftmax 11 %" in explanation
    loaded = kfconvert.load(kfconvert.save(converted, tmp_path / "net"), model=Net)
    assert loaded.kfconvert_info()["time_shares"] == converted.kfconvert_info()["time_shares"] == found
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in converted.modules())


def test_parts_have_the_share_of_their_module():
    _, converter = profiled(Net(asks=True))
    found = converter.conversion_stats["time_shares"]
    # All of head, and two of the three operators in block.
    assert found["fused"] == pytest.approx(1 / 9 + 5 / 9 * 2 / 3, abs=1e-3)


def test_excluded_sites_are_not_fused():
    _, converter = profiled(Net(), exclude=["linear_relu"], modules=["block"])
    assert converter.conversion_stats["time_shares"]["fused"] == pytest.approx(1 / 6, abs=1e-4)


def test_shares_are_only_measured_on_request():
    converter = ModelConverter(select="all", effort="fast")
    converter.convert_model(Net().eval(), example_inputs=X)
    assert converter.conversion_stats["time_shares"] is None
    assert "of the time" not in str(converter.explain())
