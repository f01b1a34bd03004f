"""What a site is measured against."""

import math

import torch
from torch import nn

from kfconvert.canonical import canonicalise
from kfconvert.inputs import ExampleCall
from kfconvert.matcher import find, mark_weights
from kfconvert.patterns import REGISTRY
from kfconvert.rewriter import LiveTensors, Site
from kfconvert.selector import _error, _sample_inputs
from kfconvert.tracer import trace


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
    _, samples = _sample_inputs(region, [site], live, [x], channels_last=False)
    (sample,) = samples.values()
    wide = x.double()
    truth = model.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    with torch.no_grad():
        torch.testing.assert_close(sample.exact()[0], truth.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sample.original()[0], model(x))


class Resized(nn.Module):
    """A site that reads a size: the scores are split into rows of the batch."""

    def forward(self, q, k, v, mask):
        scores = torch.bmm(q, k.transpose(1, 2)).view(mask.shape[0], 3, q.shape[1], k.shape[1]) + mask
        return torch.bmm(torch.softmax(scores, -1).view(q.shape[0], q.shape[1], k.shape[1]), v)


def test_sizes_are_inputs_of_a_sample():
    model, inputs = Resized().eval(), [torch.randn(6, 5, 8) for _ in range(3)] + [torch.randn(2, 1, 5, 5)]
    region = trace(model, ExampleCall(tuple(inputs)), {"batch": [(3, 0)]})
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    (match,) = find(region.graph, REGISTRY).matches
    site = Site(match, match.pattern.build(match, None), "attention")
    _, samples = _sample_inputs(region, [site], LiveTensors(model, region), inputs, channels_last=False)
    (sample,) = samples.values()
    assert any(isinstance(argument, int) for argument in sample.arguments)
    torch.testing.assert_close(sample.original()[0], model(*inputs))
    torch.testing.assert_close(sample.exact()[0], model(*(x.double() for x in inputs)))


def test_values_that_are_not_finite_must_agree():
    nan, inf = math.nan, math.inf
    truth = torch.tensor([1.0, nan, inf, -inf], dtype=torch.float64)
    assert _error([torch.tensor([1.0, nan, inf, -inf])], [truth]) == 0
    assert _error([torch.tensor([1.5, nan, inf, -inf])], [truth]) == 0.5
    for other in ([1.0, 0.0, inf, -inf], [nan, nan, inf, -inf], [1.0, nan, inf, inf], [1.0, nan, 3.0, -inf]):
        assert _error([torch.tensor(other)], [truth]) == inf
    assert _error([torch.tensor([nan])], [truth[1:2]]) == 0
