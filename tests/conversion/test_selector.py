"""What a site is measured against."""

import math

import pytest
import torch
from torch import nn

from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.captured import capture
from kfconvert.capture.tracer import trace
from kfconvert.conversion.cold_weights import modules_with_own_weights, originals_with_own_weights
from kfconvert.conversion.samples import sample_inputs
from kfconvert.conversion.selector import Selector
from kfconvert.conversion.trials import Trials, _error, flat
from kfconvert.conversion.workloads import Load
from kfconvert.graph.nodes import mark_weights
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.matching.site import Site
from kfconvert.patterns import REGISTRY
from kfconvert.region.live_tensors import LiveTensors


class CastingNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


def test_the_exact_result_is_float64_where_the_model_casts():
    model, x = CastingNorm().eval(), torch.randn(3, 8, dtype=torch.bfloat16)
    region = trace(model, ExampleCall((x,)))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    live = LiveTensors(model, region)
    (match,) = find(region.graph, REGISTRY).matches
    site = Site(match, match.pattern.build(match, live.tensor), "norm")
    _, samples = sample_inputs(region, [site], live, [x])
    (sample,) = samples.values()
    wide = x.double()
    truth = model.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    with torch.no_grad():
        torch.testing.assert_close(sample.exact()[0], truth.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sample.original()[0], model(x))


def with_sites(model, x):
    """The capture of a model, with a site for each match."""
    captured = capture(model, "", ExampleCall((x,)), [{}])
    captured.sites = [
        Site(match, match.pattern.build(match, captured.live.tensor), match.pattern.name)
        for match in captured.findings.matches
    ]
    return captured


def samples_of(model, x):
    captured = with_sites(model, x)
    return list(sample_inputs(captured.region, captured.sites, captured.live, [x])[1].values())


def test_cold_calls_read_weights_of_their_own():
    """They compute the same, and no two of them find a weight where another has read it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval()
    (sample,) = samples_of(model, torch.randn(3, 8))
    with torch.no_grad():
        exact = list(sample.exact())
        tried = Trials(sample, False, exact, 1e-3, 1e-7, 1e-3, calls=3)
        assert tried.is_cold and tried.plans
        for calls in (tried.original_calls(), *(tried.calls(name) for name in tried.plans)):
            assert len(calls) == 3
            for call in calls:
                (output,) = flat(call())
                torch.testing.assert_close(output.double(), exact[0], rtol=1e-5, atol=1e-5)
        weights = [module.weight for module in modules_with_own_weights(sample, 3)]
        assert weights[0] is model[0].weight and len({weight.data_ptr() for weight in weights}) == 3
        read = [call.args for call in originals_with_own_weights(sample, 3)[1:]]
        of_model = {parameter.data_ptr() for parameter in model.parameters()}
        assert all(of_model.isdisjoint(each.data_ptr() for each in given) for given in read)


class Permuted(nn.Module):
    """A layer norm over channels between two convolutions, as in ConvNeXt and Swin."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_only_images_become_channels_last():
    x = torch.randn(2, 3, 7, 6)
    samples = {each.site.match.pattern.name: each for each in samples_of(Permuted().eval(), x)}
    (rows,), (plain,) = (samples["layernorm"].laid_out(channels_last) for channels_last in (True, False))
    assert rows.shape == plain.shape == (2, 5, 4, 4) and rows.is_contiguous() and not plain.is_contiguous()
    torch.testing.assert_close(rows, plain)
    assert samples["layernorm"].has_layouts


@pytest.mark.parametrize("layouts", [(True, False), (False, True)])
def test_layouts_are_measured_together_and_applied_one_by_one(layouts):
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU()
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 3, 4, 4)
    captured = with_sites(model, x)
    selector = Selector(torch.device("cpu"), 1e-5, timed=False)
    selector.measure(captured.region, captured.sites, captured.live, [Load([x])], layouts)
    for channels_last in layouts:
        selector.apply(captured.sites, channels_last)
        convolution, linear = (site.replacement.module for site in captured.sites)
        assert convolution.channels_last is channels_last and not hasattr(linear, "channels_last")
        assert all(site.status == "applied" and site.strategy for site in captured.sites)


@pytest.mark.parametrize(
    "operators, medians, strategy",
    [
        (2, {"original": 10.0, "kernel": 5.0, "folded": 8.0}, "kernel"),
        (2, {"original": 10.0, "kernel": 8.0, "folded": 5.0}, "folded"),
        (1, {"original": 10.0, "kernel": 5.0}, "kernel"),
        (2, {"original": 10.0, "kernel": 10.1}, "kernel"),
        (1, {"original": 10.0, "kernel": 9.9}, None),
        (2, {"original": 10.0, "kernel": 20.0, "folded": 11.0}, None),
        (2, {"original": 10.0, "kernel": 5.0, "folded": 5.05}, "folded"),
        (2, {"original": 10.0, "kernel": 5.0, "folded": 5.2}, "kernel"),
        (1, {"original": 10.0, "kernel": 9.79, "folded": 9.81}, "kernel"),
    ],
)
def test_the_fastest_strategy_is_taken_unless_the_original_is_faster(operators, medians, strategy):
    """Several operators in one are taken at the same time, one for another only where it is faster. Of two strategies
    at the same time, the more accurate is taken."""
    ratios = {name: ratio for name, ratio in (("kernel", 1.1), ("folded", 0.9)) if name in medians}
    decision = Selector(torch.device("cpu"), 1e-5, timed=True)._fastest(operators, medians, ratios)
    assert decision.strategy == strategy and decision.original_us == medians["original"]
    assert strategy is None or (decision.fused_us, decision.error_ratio) == (medians[strategy], ratios[strategy])
    assert (decision.reason is None) == (strategy is not None)
    # An operator that is faster, but by less than it must be, is not called slower.
    told = "not faster: " if medians["kernel"] > medians["original"] else "not 2 % faster: "
    assert decision.reason is None or decision.reason.startswith(told)


def test_values_that_are_not_finite_must_agree():
    nan, inf = math.nan, math.inf
    truth = torch.tensor([1.0, nan, inf, -inf], dtype=torch.float64)
    assert _error([torch.tensor([1.0, nan, inf, -inf])], [truth]) == 0
    assert _error([torch.tensor([1.5, nan, inf, -inf])], [truth]) == 0.5
    for other in ([1.0, 0.0, inf, -inf], [nan, nan, inf, -inf], [1.0, nan, inf, inf], [1.0, nan, 3.0, -inf]):
        assert _error([torch.tensor(other)], [truth]) == inf
    assert _error([torch.tensor([nan])], [truth[1:2]]) == 0
