"""validate_optimization as (accurate, speed-up), and its report beside them."""

import copy
import gc
import json
import math
import weakref

import pytest
import torch
from torch import nn

from kfconvert import validate_optimization, validator
from kfconvert.accuracy.comparison import ValidationResult
from kfconvert.profiling import Comparison


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(validator, "SPEEDUP_BUDGET_S", 0.05)


class Counted(nn.Module):
    """A linear layer that counts its calls and writes to its input."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        assert not self.training and not torch.is_grad_enabled()
        return self.linear(x.mul_(1.0))


def pair():
    original = Counted()
    return original, copy.deepcopy(original)


def test_unpacks_and_reports(monkeypatch):
    def timed(calls, *_):
        assert list(calls) == ["original", "optimized"]
        return Comparison({"original": [3.0] * 7, "optimized": [1.0] * 7})

    monkeypatch.setattr(validator, "compare_timings", timed)
    original, optimized = pair()
    result = validate_optimization(original, optimized, torch.ones(2, 4))
    accurate, speedup = result
    assert accurate is True and speedup == 3.0
    assert isinstance(result, ValidationResult) and result.passed and result.summary().startswith("accurate: ")
    assert json.loads(json.dumps(result.as_dict()))["passed"] is True
    assert result.speedup == speedup and list(result) == [accurate, speedup]


def test_is_timed_once_and_only_where_it_is_asked_for():
    original, optimized = pair()
    result = validate_optimization(original, optimized, torch.ones(2, 4))
    assert optimized.calls == 1
    first = result.speedup
    timed = optimized.calls
    assert timed > 5 and result.speedup == first and optimized.calls == timed


def test_keeps_no_model_once_it_is_timed():
    original, optimized = pair()
    result = validate_optimization(original, optimized, torch.ones(2, 4))
    remains = weakref.ref(optimized)
    assert result.speedup > 0
    del optimized
    gc.collect()
    assert remains() is None


def test_models_and_inputs_are_as_before():
    original, optimized = pair()
    original.train(), optimized.train()
    x, state = torch.ones(2, 4), torch.get_rng_state()
    accurate, speedup = validate_optimization(original, optimized, {"x": x})
    assert accurate and speedup > 0
    assert original.training and optimized.training and torch.equal(state, torch.get_rng_state())
    assert x._version == 0


def test_a_model_that_is_wrong_or_fails():
    original, optimized = pair()
    with torch.no_grad():
        optimized.linear.bias.add_(1)
    accurate, speedup = validate_optimization(original, optimized, torch.ones(2, 4))
    assert accurate is False and speedup > 0
    optimized.linear = nn.Linear(3, 4)
    result = validate_optimization(original, optimized, torch.ones(2, 4))
    accurate, speedup = result
    assert accurate is False and math.isnan(speedup) and "the optimized model failed" in result.reason


@pytest.mark.cuda
def test_on_a_gpu():
    model = nn.Linear(64, 64).cuda()
    accurate, speedup = validate_optimization(model, copy.deepcopy(model), torch.ones(2, 64, device="cuda"))
    assert accurate and speedup > 0
