"""What a site is measured against."""

import torch
from torch import nn

from kfconvert.canonical import canonicalise
from kfconvert.inputs import ExampleCall
from kfconvert.matcher import find, mark_weights
from kfconvert.patterns import REGISTRY
from kfconvert.rewriter import LiveTensors, Site
from kfconvert.selector import _sample_inputs
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
