"""Every pattern of the registry against its own cases: what must match does, computing the same; near misses do not."""

from collections import Counter

import pytest
import torch

from kfconvert import ModelConverter
from kfconvert.canonical import canonicalise
from kfconvert.inputs import ExampleCall
from kfconvert.matcher import find, mark_weights
from kfconvert.patterns import REGISTRY
from kfconvert.tracer import trace

CASES = [pytest.param(p, c, id=f"{p.name}-{i}") for p in REGISTRY for i, c in enumerate(p.cases)]


def findings(case):
    torch.manual_seed(0)
    region = trace(case.module().eval(), ExampleCall(case.inputs()))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return find(region.graph, REGISTRY)


def test_names_are_unique():
    counts = Counter(pattern.name for pattern in REGISTRY)
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("pattern", REGISTRY, ids=lambda pattern: pattern.name)
def test_has_a_case_that_matches(pattern):
    assert any(case.count > 0 for case in pattern.cases)


@pytest.mark.parametrize("pattern, case", CASES)
def test_case_matches_as_often_as_it_says(pattern, case):
    found = findings(case)
    assert sum(match.pattern is pattern for match in found.matches) == case.count
    if case.reason is not None:
        assert any(case.reason in miss.reason for miss in found.near_misses), found.near_misses


@pytest.mark.parametrize("pattern, case", [p for p in CASES if p.values[1].count > 0])
def test_converted_case_is_as_accurate_as_the_original(pattern, case):
    torch.manual_seed(0)
    model = case.module().eval()
    for module in model.modules():  # a fresh batch norm is nearly the identity and would hide a wrong fold
        if hasattr(module, "running_var") and module.running_var is not None:
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 2)
            torch.nn.init.uniform_(module.bias, -1, 1)
    converter = ModelConverter(select="all")
    converted = converter.convert_model(model, example_inputs=case.inputs())
    stats = converter.conversion_stats
    assert stats[f"{pattern.name}_replaced"] == case.count
    assert stats["accuracy"]["passed"]
    inputs = case.inputs()
    torch.testing.assert_close(converted(*inputs), model(*inputs), equal_nan=True)
    assert converted.kfconvert_info()["guard"]["misses"] == {}
