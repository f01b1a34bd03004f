"""scripts/coverage.py compares converted models on further inputs."""

import copy
import importlib.util
from pathlib import Path

import torch
from torch import nn

SCRIPT = Path(__file__).parents[1] / "scripts" / "coverage.py"


def test_wrong_outputs_are_found():
    spec = importlib.util.spec_from_file_location("coverage_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    other = copy.deepcopy(model)
    assert script.on_other_inputs(model, other, x) is None
    with torch.no_grad():
        other.weight[0, 0] += 1
    assert "error" in script.on_other_inputs(model, other, x)
