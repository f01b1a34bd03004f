"""What calls return: which tensors are one, or share memory, and how those lie that somebody may ask to view; and
which lists and dicts somebody else holds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter

# Of a tensor of two dimensions: what changes nothing may be the tensor itself, or another that shares its memory.
OF_ALL = {
    "[:]": lambda y: y[:],
    "alias": torch.ops.aten.alias,
    "broadcast": lambda y: torch.broadcast_tensors(y, y)[1],
    "contiguous": lambda y: y.contiguous(),
    "detach": lambda y: y.detach(),
    "dropout": lambda y: F.dropout(y, 0.5, False),
    "expand": lambda y: y.expand(-1, -1),
    "identity": lambda y: y,
    "permute": lambda y: y.permute(0, 1),
    "reshape": lambda y: y.reshape(y.shape),
    "split": lambda y: y.split(8, 1)[0],
    "squeeze": lambda y: y.squeeze(1),
    "to": lambda y: y.to(torch.float32),
    "view": lambda y: y.view(y.shape),
}


class Twice(nn.Module):
    """Returns the results of all of ``OF_ALL``, of what it computes and of its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y, *(function(each) for function in OF_ALL.values() for each in (x, y))


def firsts(values):
    """For each value the place of the first that is the same object, and of the first that lies at the same address."""
    same = [next(i for i, other in enumerate(values) if other is value) for value in values]
    return same, [next(i for i, other in enumerate(values) if other.data_ptr() == value.data_ptr()) for value in values]


def test_which_outputs_are_one():
    model = Twice().eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), input_shape=(4, 8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert firsts([x, *fused(x)]) == firsts([x, *model(x)])
    assert fused.kfconvert_info()["guard"]["hits"] == 1


LAZY = {"conj": lambda y: torch.fft.rfft(y).conj(), "imaginary part": lambda y: torch.complex(y, y + 1).conj().imag}


@pytest.mark.parametrize("after", LAZY.values(), ids=LAZY)
def test_values_that_are_conjugated_or_negated_when_they_are_read(after):
    model = Returns(after).eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), input_shape=(4, 8))
    x = torch.randn(4, 8)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            expected, outputs = model(x), fused(x)
        torch.testing.assert_close(outputs.resolve_conj(), expected.resolve_conj())
    assert fused.kfconvert_info()["guard"]["hits"] == 2
    for out in (expected, outputs):
        out.abs().square().sum().backward()
    for ours, theirs in zip(fused.parameters(), model.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("shown", [lambda m: m.conv.weight.flatten(1), lambda m: m.norm.running_mean[None]])
def test_what_a_caller_writes_into_a_view_of_the_model_is_seen(shown):
    model = Shows(shown).eval()
    model.conv.weight.requires_grad_(False)
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), input_shape=(2, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    for gradients in (False, True):
        for each in (model, fused):
            with torch.set_grad_enabled(gradients):
                _, view = each(x)
            with torch.no_grad():
                view.mul_(2)
        torch.testing.assert_close(fused(x)[0], model(x)[0])
    assert fused.kfconvert_info()["guard"]["hits"] == 4


class Returns(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.linear, self.after = nn.Linear(8, 8), after

    def forward(self, x):
        return self.after(torch.relu(self.linear(x)))


class Shows(nn.Module):
    """Returns a view of one of its tensors, which folding has read."""

    def __init__(self, shown):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.norm.running_mean.uniform_(-1, 1)
        self.shown = shown

    def forward(self, x):
        return self.linear(torch.relu(self.norm(self.conv(x))).mean((2, 3))), self.shown(self)


NEW = {
    "tuples": lambda y, m, c: ((y, m.pair), m.pair),
    "tensors of an argument": lambda y, m, c: [c["inner"][0], {"y": [y]}],
}


class Returning(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.linear, self.returned = nn.Linear(8, 8), returned
        self.held, self.deep, self.pair = [2.0], {"inner": [3.0]}, (1, 2)

    def forward(self, x, c):
        return self.returned(torch.relu(self.linear(x)) * self.held[0] * self.deep["inner"][0], self, c)


def returned_by(returned):
    model = Returning(returned).eval()
    example = (torch.randn(4, 8), {"inner": [torch.randn(4, 8)]})
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), example_inputs=example)
    return model, fused, example


@torch.no_grad()
@pytest.mark.parametrize("name", NEW)
def test_lists_and_dicts_that_are_new_in_each_call(name):
    model, fused, example = returned_by(NEW[name])
    torch.testing.assert_close(fused(*example), model(*example))
    assert fused.kfconvert_info()["guard"]["hits"] == 1


class OfAnotherKind(nn.Module):
    """Gives what it returns something that no graph shows."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), change

    def forward(self, x):
        return self.change(torch.relu(self.linear(x)).detach())


def with_gradient(y):
    y.grad = torch.ones_like(y)
    return y


KINDS = {
    "a parameter": nn.Parameter,
    "a leaf that wants a gradient": lambda y: y.requires_grad_(),
    "a gradient": with_gradient,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_autograd_does_with_a_result(kind):
    x, model = torch.randn(4, 8), OfAnotherKind(KINDS[kind]).eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=x)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            ours, theirs = fused(x), model(x)
        torch.testing.assert_close(ours, theirs)
        assert type(ours) is type(theirs) and ours.requires_grad == theirs.requires_grad
        assert (ours.grad is None) == (theirs.grad is None)
