"""Tensors that a model holds otherwise than as parameters and buffers, written between two calls."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = 3


class Holding(nn.Module):
    """``use`` computes with ``tensor``, which stands in what ``wrap`` makes of it."""

    def __init__(self, tensor, wrap, use):
        super().__init__()
        self.linear, self.held, self.use = nn.Linear(16, 16), wrap(tensor), use

    def forward(self, x):
        return self.use(torch.relu(self.linear(x)), self.held)


TABLE = torch.linspace(-1, 1, 1024).reshape(64, 16)
HELD = {
    "attribute": (TABLE, lambda t: t, lambda y, held: y + held[:3]),
    "list": (TABLE, lambda t: [t], lambda y, held: y + held[0][:3]),
    "object": (TABLE, lambda t: SimpleNamespace(a=t), lambda y, held: y + held.a[:3]),
    "an index": (torch.arange(400) % 7, lambda t: [t], lambda y, held: y[:, held[0][:16]]),
    "a number in the graph": (torch.tensor(3.0), lambda t: t, lambda y, held: y * held.item()),
}


def in_place(tensor):
    tensor += 2


def by_data(tensor):
    tensor.data += 2


def by_step(tensor):
    """The fused optimizers leave the version as it was."""
    tensor.requires_grad_()
    tensor.grad = torch.ones_like(tensor)
    torch.optim.SGD([tensor], lr=2.0, fused=True).step()
    tensor.requires_grad_(False)


def the_tensor(model):
    held = model.held
    return held[0] if isinstance(held, list) else getattr(held, "a", held)


@cache
def _converted(name):
    tensor, wrap, use = HELD[name]
    torch.manual_seed(0)
    model = Holding(tensor.clone(), wrap, use).eval()
    converter = ModelConverter(select="all", check_weights=EVERY, validate_accuracy=False)
    return model, converter.convert_model(copy.deepcopy(model), example_inputs=torch.randn(3, 16))


def converted(name):
    return tuple(map(copy.deepcopy, _converted(name)))


def assert_alike(model, fused):
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", HELD)
def test_writes_are_seen(name):
    model, fused = converted(name)
    assert_alike(model, fused)
    assert fused.kfconvert_info()["guard"]["hits"] == 1
    for write in (in_place, by_step) if the_tensor(model).is_floating_point() else (in_place,):
        write(the_tensor(model)), write(the_tensor(fused))
        assert_alike(model, fused)


@pytest.mark.parametrize("name", HELD)
def test_writes_without_a_trace_are_seen_when_they_are_announced(name):
    for announce in ("refresh", "mode", "calls"):
        model, fused = converted(name)
        assert_alike(model, fused)
        by_data(the_tensor(model)), by_data(the_tensor(fused))
        if announce == "refresh":
            fused.kfconvert_refresh()
        elif announce == "mode":
            fused.train().eval()
        else:
            for _ in range(EVERY):
                fused(torch.randn(3, 16))
        assert_alike(model, fused)


def test_a_tensor_with_which_a_program_only_computes_may_be_written():
    model, fused = converted("attribute")
    in_place(model.held), in_place(fused.held)
    assert_alike(model, fused)
    assert not fused.kfconvert_info()["guard"]["misses"]
