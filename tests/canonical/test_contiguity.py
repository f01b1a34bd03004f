"""Calls of contiguous() that do nothing for the example, for inputs of another layout."""

import pytest
import torch
from support.small_models import guard
from torch import nn

from kfconvert import ModelConverter
from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.trees import aten
from kfconvert.inputs.example import ExampleCall


class _Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)


class Returned(_Linear):
    def forward(self, x):
        return x.contiguous(), torch.relu(self.linear(x))


class ResultWritten(_Linear):
    def forward(self, x):
        source = torch.relu(x)
        source.contiguous().mul_(2.0)
        return source, torch.relu(self.linear(x))


class SourceWritten(_Linear):
    def forward(self, x):
        source = torch.relu(x)
        result = source.contiguous()
        source.mul_(2.0)
        return result, torch.relu(self.linear(x))


class SeenAsComplex(_Linear):
    def forward(self, x):
        pairs = torch.view_as_complex(torch.relu(x).contiguous().unflatten(-1, (3, 2)))
        return pairs, torch.relu(self.linear(x))


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last), torch.relu(self.conv(x))


def layouts(shape):
    x = torch.randn(shape)
    yield x
    yield x.repeat_interleave(2, -1)[..., ::2]
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [Returned, ResultWritten, SourceWritten, SeenAsComplex, ChannelsLast])
@pytest.mark.parametrize("example", range(3))
def test_every_layout_is_as_in_the_original(kind, example):
    model, shape = kind().eval(), (2, 4, 6, 6) if kind is ChannelsLast else (2, 5, 6)
    converter = ModelConverter(select="all", validate_accuracy=False)
    converted = converter.convert_model(model, example_inputs=list(layouts(shape))[example])
    assert converter.conversion_stats["total_replaced"] == 1
    inputs = list(layouts(shape))
    for x in inputs:
        with torch.no_grad():
            expected, actual = model(x), converted(x)
        torch.testing.assert_close(actual, expected)
        assert actual[0].stride() == expected[0].stride()
        assert (actual[0].data_ptr() == x.data_ptr()) is (expected[0].data_ptr() == x.data_ptr())
    assert guard(converted) == {"hits": len(inputs), "misses": {}}


@pytest.mark.parametrize("reached", [False, True])
def test_calls_that_no_layout_reaches_are_left_out(reached):
    class Attention(_Linear):
        def forward(self, x):
            y = self.linear(x).contiguous()
            y = nn.functional.scaled_dot_product_attention(y, y, y).contiguous()
            return y if reached else self.linear(y)

    region = trace(Attention().eval(), ExampleCall((torch.randn(2, 5, 6),)))
    canonicalise(region.graph)
    kept = [node for node in region.graph.nodes if node.target is aten.contiguous.default]
    assert len(kept) == (1 if reached else 0)  # that of the linear layer never does anything


@pytest.mark.parametrize("kind", ["returned", "written"])
def test_calls_of_what_is_always_contiguous_are_left_out(kind):
    class Model(_Linear):
        def forward(self, x):
            y = torch.sigmoid(self.linear(x)).contiguous()
            return y if kind == "returned" else y.add_(1.0)

    region = trace(Model().eval(), ExampleCall((torch.randn(2, 5, 6),)))
    canonicalise(region.graph)
    assert aten.contiguous.default not in {node.target for node in region.graph.nodes}
