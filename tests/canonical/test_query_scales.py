"""Factors of queries become the scale of attention, if nothing else depends on the scaled queries."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert.capture import capture
from kfconvert.inputs import ExampleCall

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Heads(nn.Module):
    """Attention of the queries that ``function`` returns for x, as views of 2 heads; others are views of x."""

    def __init__(self, function, scale=None):
        super().__init__()
        self.function, self.scale = function, scale

    def forward(self, x):
        queries = self.function(x)
        q, k = (each.view(*each.shape[:2], 2, 8).transpose(1, 2) for each in (queries, x))
        y = F.scaled_dot_product_attention(q, k, k, scale=self.scale)
        return (y, queries) if self.function is returned else y


def returned(x):
    return x * 0.5


FOLDED = {
    "factor": (lambda x: x * 0.5, 1.0, 0.5),
    "factor before": (lambda x: 0.25 * x, None, 0.25 * 8**-0.5),
    "divisor": (lambda x: x / 4, 2.0, 0.5),
    "numerator": (lambda x: 2.0 / x, 1.0, 2.0),
}
KEPT = {
    "returned": (returned, 1.0),
    "negative": (lambda x: x * -0.5, 1.0),
    "zero": (lambda x: x * 0, 1.0),
    "tensor": (lambda x: x * x[:1, :1, :1], 1.0),
    "negative scale": (lambda x: x * 0.5, -1.0),
    "written": (lambda x: (x * 0.5).relu_().add_(1), 1.0),
}


class Keys(nn.Module):
    """Attention in which the scaled queries are other arguments, too."""

    def __init__(self, view):
        super().__init__()
        self.view = view

    def forward(self, x):
        queries = self.view(x * 0.5)
        return F.scaled_dot_product_attention(queries, queries, self.view(x))


def captured(model, x):
    found = capture(model, "", ExampleCall((x,)), [{}])
    with torch.no_grad():
        expected, outputs = model(x), found.plain_program().run([x])
    for ours, theirs in zip(outputs, expected if isinstance(expected, tuple) else [expected], strict=True):
        torch.testing.assert_close(ours, theirs)
    return found.region.graph


@pytest.mark.parametrize("name", FOLDED)
def test_factors_are_folded(name):
    function, scale, expected = FOLDED[name]
    graph = captured(Heads(function, scale).eval(), torch.rand(2, 5, 16) + 0.1)
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.kwargs["scale"] == pytest.approx(expected)
    products = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor
    assert not [node for node in graph.nodes if node.target in products]


@pytest.mark.parametrize("name", KEPT)
def test_other_products_are_kept(name):
    function, scale = KEPT[name]
    graph = captured(Heads(function, scale).eval(), torch.rand(2, 5, 16) + 0.1)
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.kwargs["scale"] == scale


@pytest.mark.parametrize("view", [lambda q: q, lambda q: q.view(2, 5, 2, 8).transpose(1, 2)])
def test_queries_that_are_keys_are_kept(view):
    graph = captured(Keys(view).eval(), torch.randn(2, 5, 16))
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert not attention.kwargs.get("scale")
