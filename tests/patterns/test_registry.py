"""Every pattern of the registry against its own cases: what must match does, computing the same; near misses do not.

The short run puts the fused modules into the traced graph of every case, and converts one case of each file of
patterns.
"""

from collections import Counter
from functools import cache

import pytest
import torch
from torch.utils._pytree import tree_leaves

from kfconvert import ModelConverter
from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.matching.rewriter import rewrite
from kfconvert.matching.site import Site
from kfconvert.patterns import REGISTRY
from kfconvert.region import LiveTensors

CASES = [pytest.param(p, c, id=f"{p.name}-{i}") for p in REGISTRY for i, c in enumerate(p.cases)]
MATCHING = [case for case in CASES if case.values[1].count > 0]


def exhaustive_but_for_the_first(cases):
    """``cases``, all but the first of each file of patterns marked as exhaustive."""
    chosen, seen = [], set()
    for case in cases:
        file = case.values[0].refusal.__module__
        marks = [pytest.mark.exhaustive] if file in seen else []
        chosen.append(pytest.param(*case.values, id=case.id, marks=marks))
        seen.add(file)
    return chosen


def built(case):
    """The model of ``case``, with batch norms that are not nearly the identity: that would hide a wrong fold."""
    torch.manual_seed(0)
    model = case.module().eval()
    for module in model.modules():
        if hasattr(module, "running_var") and module.running_var is not None:
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            for parameter, low, high in ((module.weight, 0.5, 2), (module.bias, -1, 1)):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, low, high)
    return model


@cache
def traced(case):
    """(model, its region, what the matcher finds in it)"""
    model = built(case)
    region = trace(model, ExampleCall(case.inputs()))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return model, region, find(region.graph, REGISTRY)


def test_names_are_unique_and_each_pattern_has_a_case_that_matches():
    counts = Counter(pattern.name for pattern in REGISTRY)
    assert not [name for name, count in counts.items() if count > 1]
    assert not [pattern.name for pattern in REGISTRY if not any(case.count for case in pattern.cases)]


@pytest.mark.parametrize("pattern, case", CASES)
def test_case(pattern, case):
    """It matches as often as it says, and fused modules in the graph compute what the original does."""
    model, region, found = traced(case)
    assert sum(match.pattern is pattern for match in found.matches) == case.count
    if case.reason is not None:
        assert any(case.reason in miss.reason for miss in found.near_misses), found.near_misses
    if not case.count:
        return
    live = LiveTensors(model, region)
    sites = [Site(match, match.pattern.build(match, live.tensor), "") for match in found.matches]
    program = rewrite(region, sites, live)
    inputs = case.inputs()
    with torch.no_grad():
        actual, expected = program.run(tree_leaves(inputs)), tree_leaves(model(*inputs))
    torch.testing.assert_close(list(actual), expected, equal_nan=True)


# What a pattern may capture -> whether results show that this value was taken for the one that most models have.
UNUSUAL = {
    "bias": lambda value: value is None,
    "dilation": lambda value: any(number != 1 for number in value),
    "eps": lambda value: value is not None and value > 0.01,
    "groups": lambda value: value != 1,
    "negative_slope": lambda value: value != 0.01,
    "normalized_shape": lambda value: len(value) > 1,
    "num_groups": lambda value: value > 1,
    "offset": lambda value: value != 0,
    "padding": lambda value: value == "same" or any(value),
    "scale": lambda value: value is None,
    "shift": lambda value: value is None,
    "stride": lambda value: any(number != 1 for number in value),
}


@pytest.mark.exhaustive
def test_settings_are_tried_beside_their_usual_values():
    """So the cases notice a fused module that takes one of them for granted."""
    tried = {}
    for pattern in REGISTRY:
        matches = [match for case in pattern.cases if case.count for match in traced(case)[-1].matches]
        matches = [member for match in matches if match.pattern is pattern for member in match.members or (match,)]
        for captures in (match.captures for match in matches):
            for name in captures.keys() & UNUSUAL.keys():
                place = pattern.refusal.__module__, name
                tried[place] = tried.get(place, False) or UNUSUAL[name](captures[name])
    assert len(tried) > 20
    usual = [place for place, unusual in tried.items() if not unusual]
    assert usual == [], "no matching case has an unusual value of this capture: add one, or rename the capture"


@pytest.mark.parametrize("pattern, case", exhaustive_but_for_the_first(MATCHING))
def test_converted_case_is_as_accurate_as_the_original(pattern, case):
    model = built(case)
    converter = ModelConverter(select="all", effort="fast")
    converted = converter.convert_model(model, example_inputs=case.inputs())
    stats = converter.conversion_stats
    assert stats[f"{pattern.name}_replaced"] == case.count
    assert stats["accuracy"]["passed"]
    inputs = case.inputs()
    torch.testing.assert_close(converted(*inputs), model(*inputs), equal_nan=True)
    assert converted.kfconvert_info()["guard"]["misses"] == {}
