"""What a conversion tells the logger ``kfconvert``."""

import logging

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ModelConverter

X = torch.randn(2, 6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))))


def told(caplog, level):
    """The messages of this level."""
    records = [record for record in caplog.records if record.name.split(".")[0] == "kfconvert"]
    assert all(record.levelno in (logging.DEBUG, logging.INFO) for record in records)
    return [record.getMessage() for record in records if record.levelno == level]


def test_decisions_are_told_by_conversion_and_by_load(caplog, tmp_path):
    caplog.set_level(logging.DEBUG, "kfconvert")
    model = Net()
    fused = ModelConverter(select="all", modules=["first"], effort="fast").convert_model(model, example_inputs=X)
    whole, sites = told(caplog, logging.INFO), told(caplog, logging.DEBUG)
    assert whole[0] == "converting Net; non-default options: {'select': 'all', 'effort': 'fast', 'modules': ('first',)}"
    assert "Net: captured as called with float32[2, 6]" in whole and "Net: 1 of 3 sites fused" in whole
    assert any(line.startswith("Net: accuracy pass") for line in whole)
    assert any(line.startswith("Net: speed original ") for line in whole)
    decisions = [line for line in sites if line.startswith("Net.")]
    assert len(decisions) == 3 and sum("linear: fused (" in line for line in decisions) == 1
    assert sum("linear_relu: not fused, excluded by modules=['first']: it covers" in line for line in decisions) == 2
    assert any(line.startswith("trace took ") for line in sites)
    path = kfconvert.save(fused, tmp_path / "net")
    caplog.clear()
    kfconvert.load(path, model=Net)
    assert [line for line in told(caplog, logging.DEBUG) if line.startswith("Net.")] == decisions
    assert "Net: 1 of 3 sites fused" in told(caplog, logging.INFO)


@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_why_nothing_was_fused_is_told(caplog):
    caplog.set_level(logging.INFO, "kfconvert")
    ModelConverter(include=[], effort="fast").convert_model(Net(), example_inputs=X)
    assert told(caplog, logging.INFO)[-1].startswith("Net: the original is returned: 2 sites were found")


def test_by_default_nothing_is_printed(capfd):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU())
    ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=X)
    assert capfd.readouterr() == ("", "")
