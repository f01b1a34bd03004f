"""What is known of single nodes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert.graph.nodes import draws

X = torch.randn(2, 3, 8)


def attention(dropout: float):
    return lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)


def rnn(kind: type, training: bool, dropout: float):
    return kind(8, 8, num_layers=2, dropout=dropout).train(training)


DRAW_NOTHING = {
    "attention": attention(0.0),
    "attention without an argument": lambda x: F.scaled_dot_product_attention(x, x, x),
    **{f"{kind.__name__} in eval mode": rnn(kind, False, 0.5) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"{kind.__name__} without dropout": rnn(kind, True, 0.0) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "dropout in eval mode": lambda x: torch.dropout(x, 0.5, False),
    "native dropout in eval mode": lambda x: torch.native_dropout(x, 0.5, train=False),
    "rrelu in eval mode": nn.RReLU().eval(),
}
DRAW = {
    "attention": attention(0.5),
    **{kind.__name__: rnn(kind, True, 0.5) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "dropout": lambda x: torch.dropout(x, 0.5, True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, None),
    "rrelu": nn.RReLU().train(),
    "bernoulli": lambda x: torch.bernoulli(x, 0.0),
    "rand_like": torch.rand_like,
}


def seen(function) -> list[bool]:
    """What ``draws`` says of the calls in ``function``, as operators see them."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = function

        def forward(self, x):
            return self.inner(x)

    graph = torch.export.export(Module(), (X,), strict=False).graph
    return [draws(node) for node in graph.nodes if node.op == "call_function"]


def moves_generator(function) -> bool:
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        function(X)
        return not torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", DRAW_NOTHING)
def test_a_call_that_is_told_to_draw_nothing_draws_nothing(name):
    assert not moves_generator(DRAW_NOTHING[name]) and not any(seen(DRAW_NOTHING[name]))


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", DRAW)
def test_a_call_that_draws(name):
    assert any(seen(DRAW[name]))
