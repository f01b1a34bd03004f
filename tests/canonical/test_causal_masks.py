"""Causal masks that traces build from positions become the flag of attention, for fixed and free sizes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert.capture import capture
from kfconvert.inputs import ExampleCall

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def indices(x, keys_from=0, queries_from=0):
    n = x.shape[-2]
    queries, keys = torch.arange(n, device=x.device) + queries_from, torch.arange(n, device=x.device) + keys_from
    return queries[None, None, :, None], keys[None, None, None, :]


def transformers(x):
    """As transformers 5 builds it, with the numbers of packed sequences."""
    queries, keys = indices(x)
    places = torch.arange(x.shape[-2], device=x.device)[None].expand(x.shape[0], -1)
    packed = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    mask = queries.new_ones((), dtype=torch.bool) & (keys <= queries)
    return (mask & (packed[batch, queries] == packed[batch, keys])).expand(x.shape[0], -1, -1, -1)


def at_least(x):
    queries, keys = indices(x, 3, 3)
    return queries >= keys


def strict(x):
    queries, keys = indices(x)
    return keys < queries


def shifted(x):
    queries, keys = indices(x, 1, 0)
    return keys <= queries


def reversed_places(x):
    queries, keys = indices(x)
    return queries <= keys


def window(x):
    queries, keys = indices(x)
    return (keys <= queries) & (queries - keys < 4)


def packed(x):
    queries, keys = indices(x)
    places = x[:, 0, :, 0].long()
    numbers = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (keys <= queries) & (numbers[:, None, :, None] == numbers[:, None, None, :])


def written(x):
    queries, keys = indices(x)
    mask = keys <= queries
    mask[..., 0, :].fill_(True)
    return mask


def narrow(x):
    """Its positions start again after 127."""
    places = torch.arange(x.shape[-2], dtype=torch.int8, device=x.device)
    return places[None] <= places[:, None]


def first_key(x):
    return torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device).tril().expand(x.shape[-2], -1)


def first_query(x):
    queries, keys = indices(x)
    return keys <= queries[..., :1, :].expand(-1, -1, x.shape[-2], -1)


def broadcast(x):
    queries, keys = indices(x)
    return (keys <= queries[..., :1, :]) & torch.ones(x.shape[-2], 1, dtype=torch.bool, device=x.device)


CAUSAL = {
    "transformers": transformers,
    "at least": at_least,
    "tril": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril(),
}
OTHERS = {
    each.__name__: each
    for each in (strict, shifted, reversed_places, window, packed, written, narrow, first_key, first_query, broadcast)
}


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x.cos(), x.sin(), self.mask(x))


class FewerQueries(Attention):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[:, :, :3], x.cos(), x.sin(), self.mask(x)[:3])


def captured(model, x, free):
    found = capture(model, "", ExampleCall((x,)), [{"size": [(0, 2)]}] if free else [{}])
    return found, found.variant(()).program


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", [*CAUSAL, *OTHERS])
def test_masks(name, free):
    model, x = Attention((CAUSAL | OTHERS)[name]).eval(), torch.randn(2, 3, 8, 4)
    found, program = captured(model, x, free)
    (call,) = found.region.graph.find_nodes(op="call_function", target=ATTENTION)
    assert bool(call.kwargs.get("is_causal")) == (name in CAUSAL)
    for each in (x, torch.randn(2, 3, 11, 4)) if free else (x,):
        torch.testing.assert_close(program.run([each])[0], model(each), equal_nan=True)


def test_fewer_queries_than_keys():
    model, x = FewerQueries(CAUSAL["tril"]).eval(), torch.randn(2, 3, 8, 4)
    found, program = captured(model, x, False)
    (call,) = found.region.graph.find_nodes(op="call_function", target=ATTENTION)
    assert not call.kwargs.get("is_causal")
    torch.testing.assert_close(program.run([x])[0], model(x))
