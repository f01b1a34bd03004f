"""Norms and their reader, a product or attention, become one module, if nothing else reads the normalized values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.matching.rewriter import rewrite
from kfconvert.matching.site import Site
from kfconvert.modules import (
    FusedDecodeAttention,
    FusedLayerNorm,
    FusedLinear,
    FusedLinearScale,
    FusedNormLinear,
    FusedRMSNorm,
    joined,
)
from kfconvert.patterns import REGISTRY
from kfconvert.region import LiveTensors

X = torch.randn(2, 1, 16), torch.randn(2, 1, 16)


class Block(nn.Module):
    """``function`` of this module, x and the residual."""

    def __init__(self, function, norm=nn.RMSNorm):
        super().__init__()
        self.function = function
        self.norm = norm(16)
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x, residual):
        return self.function(self, x, residual)


def gated(self, x, residual):
    """A pre-norm MLP, and the residual stream."""
    stream = x + residual
    y = self.norm(stream)
    return self.down(F.silu(self.gate(y)) * self.up(y)).tanh() + stream


def merged(self, x, residual):
    y = self.norm(x)
    return self.gate(y).sin() * self.up(y).cos() * residual


def shared(self, x, residual):
    y = self.norm(x)
    return self.gate(y).sin() * self.up(y).cos() * y


def between(self, x, residual):
    y = self.norm(x) * residual
    return self.gate(y).sin() * self.up(y).cos()


def program_of(model, strategies=("kernel", "skinny"), inputs=X):
    region = trace(model, ExampleCall(inputs))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    live = LiveTensors(model, region)
    sites = [Site(match, match.pattern.build(match, live.tensor), "") for match in find(region.graph, REGISTRY).matches]
    for site in sites:
        site.replacement.module.strategy = strategies["norm" not in site.match.pattern.name]
    return rewrite(region, sites, live, join=joined)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(
    "function, count, strategies",
    [
        (gated, 1, ("kernel", "skinny")),
        (merged, 1, ("kernel", "skinny")),
        (merged, 0, ("composition", "skinny")),
        (merged, 0, ("kernel", "merged")),
        (shared, 0, ("kernel", "skinny")),
        (between, 0, ("kernel", "skinny")),
    ],
)
def test_joined(function, count, strategies, norm):
    torch.manual_seed(0)
    model = Block(function, norm).eval()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        program = program_of(model, strategies)
        assert sum(isinstance(module, FusedNormLinear) for module in program.modules.values()) == count
        for _ in range(2):
            torch.testing.assert_close(list(program.run(tree_leaves(X))), [model(*X)])
            for parameter in model.parameters():
                parameter.mul_(1.25)


class Heads(nn.Module):
    """A step of attention with norms of the heads of q and k; ``function`` changes the normalized q."""

    def __init__(self, k_norm, function=lambda q: q, is_transposed_first=False):
        super().__init__()
        self.q_norm, self.k_norm, self.function = nn.RMSNorm(8), k_norm, function
        self.is_transposed_first = is_transposed_first

    def forward(self, q, k, keys, values, place, mask):
        v = k.transpose(1, 2)
        if self.is_transposed_first:
            q, k = self.q_norm(q.transpose(1, 2)), self.k_norm(k.transpose(1, 2))
        else:
            q, k = self.function(self.q_norm(q)).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        keys, values = keys.index_copy(2, place, k), values.index_copy(2, place, v)
        return F.scaled_dot_product_attention(q, keys, values, mask), keys, values


@pytest.mark.parametrize(
    "model, strategies, count",
    [
        (Heads(nn.RMSNorm(8)), ("kernel", "kernel"), 1),
        (Heads(nn.RMSNorm(8), is_transposed_first=True), ("kernel", "kernel"), 1),
        (Heads(nn.RMSNorm(8)), ("kernel", "composition"), 0),
        (Heads(nn.RMSNorm(8)), ("composition", "kernel"), 0),
        (Heads(nn.RMSNorm(8, eps=0.1)), ("kernel", "kernel"), 0),
        (Heads(nn.Identity()), ("kernel", "kernel"), 0),
        (Heads(nn.RMSNorm(8), lambda q: q.relu()), ("kernel", "kernel"), 0),
        (Heads(nn.RMSNorm(8), lambda q: q + q.sum()), ("kernel", "kernel"), 0),
    ],
)
def test_norms_of_heads_are_joined_with_attention(model, strategies, count):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    inputs = q, k, torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.tensor([3]), torch.rand(2, 1, 1, 5) < 0.9
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 2)
        program = program_of(model, strategies, inputs)
        attentions = [each for each in program.modules.values() if isinstance(each, FusedDecodeAttention)]
        assert [len(each.norms) for each in attentions] == [2 * count]
        for _ in range(2):
            torch.testing.assert_close(list(program.run(tree_leaves(inputs))), [*model(*inputs)])
            for parameter in model.parameters():
                parameter.mul_(1.25)


@pytest.mark.parametrize(
    "norm, product",
    [
        (FusedRMSNorm(16, activation="silu"), FusedLinear(16, 8)),
        (FusedRMSNorm(16, elementwise_affine=False), FusedLinear(16, 8)),
        (FusedRMSNorm((2, 16)), FusedLinear(16, 8)),
        (FusedLayerNorm(16, activation="silu"), FusedLinear(16, 8)),
        (FusedLayerNorm(16, elementwise_affine=False), FusedLinear(16, 8)),
        (FusedRMSNorm(16), FusedLinearScale.from_tensors(torch.ones(8, 16), None, torch.ones(8))),
        (FusedRMSNorm(16), FusedRMSNorm(16)),
    ],
)
def test_not_joined(norm, product):
    norm.strategy, product.strategy = "kernel", "skinny"
    assert joined(product, norm) is None
    with pytest.raises(ValueError, match="cannot run in one launch"):
        FusedNormLinear(norm, product)
