"""Calls with a gradient that go to an autograd function at once, and those that must go by way of the dispatcher."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import ops

# name -> (a public function of two tensors of shape (4, 8), the operator below its autograd layer)
CALLS = {
    "differentiate": (lambda x, y: ops.swish_multiply(x, y), "combine_act"),
    "differentiate_by_decomposition": (lambda x, y: ops.add_layer_norm(x, y, 8), "layer_norm_act_training"),
}


def pair(device):
    return [torch.randn(4, 8, device=device, requires_grad=True) for _ in "xy"]


def first(y):
    return y[0] if isinstance(y, tuple) else y


class Names(TorchDispatchMode):
    """The names of this package's operators that were called."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "kfconvert":
            self.seen.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def is_at_once(y):
    return not first(y).grad_fn.name().startswith("GeneratedBackwardFor")


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_give_the_same(device, name):
    function, _ = CALLS[name]
    leaves = pair(device)
    y = function(*leaves)
    with Names():
        recorded = function(*leaves)
    assert is_at_once(y) and not is_at_once(recorded)
    assert torch.equal(first(y), first(recorded))
    grad = torch.randn_like(first(y))
    for own, others in zip(*(torch.autograd.grad(first(v), leaves, grad) for v in (y, recorded)), strict=True):
        assert torch.equal(own, others)


@pytest.mark.parametrize("name", CALLS)
def test_who_records_sees_the_operator(device, name):
    function, operator = CALLS[name]
    leaves = pair(device)
    with Names() as names:
        function(*leaves)
    assert names.seen == [operator]
    graph = make_fx(lambda *tensors: first(function(*tensors)))(*leaves).graph
    assert any(f"kfconvert.{operator}.default" == str(node.target) for node in graph.nodes)
    with FakeTensorMode() as mode:
        y = first(function(*(mode.from_tensor(t) for t in leaves)))
        assert y.shape == (4, 8) and y.requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_autocast_aligns_first(device, name):
    function, _ = CALLS[name]
    x, y = pair(device)
    half = y.detach().bfloat16().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        result = first(function(x, half))
    assert result.dtype == torch.float32
    grads = torch.autograd.grad(result.sum(), (x, half))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name", CALLS)
def test_only_what_needs_a_gradient_gets_one(device, name):
    function, _ = CALLS[name]
    x, y = pair(device)
    result = first(function(x, y.detach()))
    want = torch.autograd.grad(first(function(x, y)).square().sum(), x)
    assert torch.equal(torch.autograd.grad(result.square().sum(), x)[0], want[0])
    with torch.no_grad():
        assert not first(function(x, y)).requires_grad
