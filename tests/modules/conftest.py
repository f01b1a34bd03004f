import pytest
import torch
from support.devices import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def every_strategy(monkeypatch):
    """Small weights are packed too, so that all strategies are tried on small modules."""
    monkeypatch.setattr("kfconvert.modules.linear.MKL_MIN_WEIGHT_BYTES", 0)
