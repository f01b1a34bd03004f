"""Gradients of models whose backward pass may not be that of the operators in their captured graph: a
torch.autograd.Function has a backward, and torch.no_grad() leaves no mark in the graph."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kfconvert
from kfconvert import ModelConverter


class Function(torch.autograd.Function):
    """Of the subclasses each has another backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 16) / 16


@torch.library.custom_op("kfconvert_tests_gradients::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 5)


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda gradient: 3 * gradient)
    return h


def without_gradients(h):
    with torch.no_grad():
        gate = torch.tanh(h)
    return h * gate


def written_without_gradients(h):
    h = h * 1
    first = h[:, 0]
    with torch.no_grad():
        first.mul_(3)
    return h


def under_inference_mode(h):
    with torch.inference_mode():
        gate = torch.tanh(h)
    return h * gate.clone()


def quantized(h):
    """As in VQ: only an index leaves the block without gradients. The program has the gradients, and warns."""
    with torch.no_grad():
        nearest = (h[..., None] - torch.linspace(-1, 1, 5)).abs().argmin(-1)
    return h + (nearest - h).detach()


# What is done between two layers, and whether the captured graph has its gradients.
KINDS = {
    "rounding": (Rounding.apply, False),
    "a hook": (hooked, False),
    "no_grad": (without_gradients, False),
    "no_grad, in place": (written_without_gradients, False),
    "inference_mode": (under_inference_mode, False),
    "a reentrant checkpoint": (lambda h: checkpoint(torch.tanh, h, use_reentrant=True), False),
    "an index of no_grad": (quantized, False),
    "a registered operator": (lambda h: doubled(h), True),
}
X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        self.middle = middle

    def forward(self, x):
        return self.down(self.middle(self.act(self.up(x))))


@functools.cache
def _made(kind):
    torch.manual_seed(0)
    model = Net(KINDS[kind][0]).eval()
    converter = ModelConverter(select="all", effort="fast")
    return model, converter.convert_model(copy.deepcopy(model), example_inputs=X)


def made(kind):
    """A model, and it converted; of both nothing has been compiled yet."""
    return copy.deepcopy(_made(kind))


def gradients(model, exported=False, again=False):
    """Those of parameters and of the input, or of their sum of squares; and the warnings of kfconvert."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        call, x = kfconvert.export(model, X).module() if exported else model, X.clone().requires_grad_()
        wanted = [*(call.get_parameter(name) for name, _ in model.named_parameters()), x]
        loss = (call(x) * torch.linspace(1, 2, 4)).sin().sum()
        if again:
            found = torch.autograd.grad(loss, wanted, create_graph=True)
            loss = sum(gradient.square().sum() for gradient in found)
        loss.backward()
    return [each.grad for each in wanted], [str(w.message) for w in recorded if str(w.message).startswith("kfconvert")]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_original(kind):
    model, fused = made(kind)
    assert_close(gradients(fused)[0], gradients(model)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_has_them_or_a_warning_says_why_not(kind):
    model, fused = made(kind)
    if kind == "a hook":
        with pytest.raises(kfconvert.ArtifactError, match="its code asks for requires_grad"):
            kfconvert.export(fused, X)
        return
    actual, warned = gradients(fused, exported=True)
    if KINDS[kind][1]:
        assert not warned
        assert_close(actual, gradients(model)[0])
    else:
        (message,) = warned
        assert "the exported program of Net is for inference only" in message


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a reentrant checkpoint"])
def test_gradients_of_gradients(kind):
    found = [gradients(model, again=True)[0] for model in made(kind)]
    assert_close(*found)


class Hooking(Net):
    def forward(self, x):
        self.down.weight.register_hook(lambda gradient: gradient * 3)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Net, Hooking])
@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_a_conversion_leaves_frozen_parameters_and_hooks_as_they_were(kind):
    model = kind(Rounding.apply).eval()
    model.up.requires_grad_(False)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, example_inputs=X, inplace=True
    )
    assert [p.requires_grad for p in fused.parameters()] == [False, False, True, True]
    assert not fused.down.weight._backward_hooks
