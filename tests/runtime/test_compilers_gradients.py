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
from kfconvert.inputs import class_name
from kfconvert.region import Unstorable, kept, made_region

SCALE = 1.0


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


class Reversing(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Scaling(Function):
    """Its backward is that of the operators as long as SCALE is 1."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE


class Marking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        first, second = x * 2, x * 3
        ctx.mark_non_differentiable(second)
        return first, second

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient


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


def written_behind_its_back(h):
    h = h * 1
    h.detach()[:, 0] = 1
    return torch.tanh(h)


def quantized(h):
    """As in VQ: only an index leaves the block without gradients."""
    with torch.no_grad():
        nearest = (h[..., None] - torch.linspace(-1, 1, 5)).abs().argmin(-1)
    return h + (nearest - h).detach()


# What is done between two layers, and whether the captured graph has its gradients.
KINDS = {
    "rounding": (Rounding.apply, False),
    "reversing": (Reversing.apply, False),
    "a global in backward": (Scaling.apply, False),
    "two outputs": (lambda h: sum(Marking.apply(h)), False),
    "a hook": (hooked, False),
    "no_grad": (without_gradients, False),
    "no_grad, in place": (written_without_gradients, False),
    "inference_mode": (under_inference_mode, False),
    "a reentrant checkpoint": (lambda h: checkpoint(torch.tanh, h, use_reentrant=True), False),
    "a checkpoint": (lambda h: checkpoint(torch.tanh, h, use_reentrant=False), True),
    "an index of no_grad": (quantized, True),
    "detach": (lambda h: h * h.detach(), True),
    "detach, in place": (written_behind_its_back, True),
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
    return model, ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=X)


def made(kind):
    """A model, and it converted; of both nothing has been compiled yet."""
    return copy.deepcopy(_made(kind))


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch._dynamo.reset()


WAYS = {
    "itself": lambda model, x: model,
    "compile": lambda model, x: torch.compile(model, backend="aot_eager"),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "kfconvert.export": lambda model, x: kfconvert.export(model, x).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
}


def gradients(way, model, again=False):
    """Those of parameters and of the input, or of their sum of squares; and what kfconvert has warned of."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        call, x = WAYS[way](model, X), X.clone().requires_grad_()
        owner = model if way == "compile" else call
        wanted = [*(owner.get_parameter(name) for name, _ in model.named_parameters()), x]
        loss = (call(x) * torch.linspace(1, 2, 4)).sin().sum()
        if again:
            found = torch.autograd.grad(loss, wanted, create_graph=True)
            loss = sum(gradient.square().sum() for gradient in found)
        loss.backward()
    return [each.grad for each in wanted], [str(w.message) for w in recorded if str(w.message).startswith("kfconvert")]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_original_or_a_warning_says_why(kind, way):
    model, fused = made(kind)
    if way != "itself" and kind == "a reentrant checkpoint" and "export" in way:
        pytest.skip("torch.export fails in its backward pass")
    if kind == "a hook" and way == "kfconvert.export":
        with pytest.raises(kfconvert.ArtifactError, match="its code asks for requires_grad"):
            kfconvert.export(fused, X)
        return
    (actual, told), (expected, _) = gradients(way, fused), gradients("itself", model)
    if way == "itself":
        assert_close(actual, expected)
    elif KINDS[kind][1]:
        assert not told
        assert_close(actual, expected)
    elif way == "kfconvert.export":
        (message,) = told
        assert "the exported program of Net is for inference only" in message and "up.weight" in message
    else:
        (message,) = told
        assert "gets the original forward of Net" in message and "\n" not in message
        # torch.export and torch.jit.trace lose some of these gradients themselves.
        assert_close(actual, expected if way == "compile" else gradients(way, copy.deepcopy(_made(kind)[0]))[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a reentrant checkpoint"])
def test_gradients_of_gradients(kind):
    found = [gradients("itself", model, again=True)[0] for model in made(kind)]
    assert_close(*found)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "itself"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_where_no_gradients_are_wanted_programs_are_fused(way):
    model, fused = made("rounding")
    with torch.no_grad(), warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        torch.testing.assert_close(WAYS[way](fused, X)(X), model(X))
    told = [str(w.message) for w in recorded if str(w.message).startswith("kfconvert")]
    assert ["for inference only" in message for message in told] == ([] if way == "compile" else [True])


def test_what_is_frozen_when_it_is_compiled_and_trained_later():
    model, fused = made("rounding")
    compiled = torch.compile(fused, backend="aot_eager")
    for frozen in (True, False):
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            for each, call in ((model, model), (fused, compiled)):
                each.zero_grad()
                each.up.requires_grad_(not frozen)
                call(X).sin().sum().backward()
        assert_close(fused.down.weight.grad, model.down.weight.grad)
        assert (fused.up.weight.grad is None) is frozen
        assert len([w for w in recorded if str(w.message).startswith("kfconvert")]) == (not frozen)
    assert_close(fused.up.weight.grad, model.up.weight.grad)


def test_a_global_that_backward_reads_may_change(monkeypatch):
    model, fused = made("a global in backward")
    compiled = torch.compile(fused, backend="aot_eager")
    for scale in (1.0, 5.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        found = []
        for each, call in ((model, model), (fused, fused), (fused, compiled)):
            each.zero_grad()
            call(X).sin().sum().backward()
            found.append([parameter.grad for parameter in each.parameters()])
        for other in found[1:]:
            assert_close(other, found[0])


class Preprocessing(Net):
    def forward(self, x):
        with torch.no_grad():
            x = (x - x.mean()) / x.std()
        return super().forward(x)


@pytest.mark.filterwarnings("always:kfconvert")
def test_an_argument_that_wants_no_gradient_needs_none(recwarn):
    model = Preprocessing(nn.Identity()).eval()
    fused = ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=X)
    compiled = torch.compile(fused, backend="aot_eager")
    for count, x in enumerate((X, X.clone().requires_grad_())):
        for each, call in ((model, model), (fused, compiled)):
            each.zero_grad()
            call(x).sin().sum().backward()
        assert_close([p.grad for p in fused.parameters()], [p.grad for p in model.parameters()])
        assert len([w for w in recwarn if "another gradient of x" in str(w.message)]) == count
    assert x.grad is None


class Hooking(Net):
    def forward(self, x):
        self.down.weight.register_hook(lambda gradient: gradient * 3)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Net, Hooking])
@pytest.mark.filterwarnings("ignore:kfconvert fused nothing")
def test_a_conversion_leaves_frozen_parameters_and_hooks_as_they_were(kind):
    model = kind(Rounding.apply).eval()
    model.up.requires_grad_(False)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=X, inplace=True)
    assert [p.requires_grad for p in fused.parameters()] == [False, False, True, True]
    assert not fused.down.weight._backward_hooks


def refusing(h):
    if h.requires_grad:
        raise RuntimeError("it cannot be differentiated")
    return h


def test_no_gradient_is_taken_for_right_where_the_forward_raises():
    fused = ModelConverter(select="all").convert_model(Net(refusing).eval(), example_inputs=X)
    parameters = {f"p_{name.replace('.', '_')}" for name, _ in fused.named_parameters()}
    assert fused.forward.variants[0].region.lost_gradients == {*parameters, "x"}


def test_a_stored_graph_tells_of_it():
    _, fused = made("rounding")
    region = fused.forward.variants[0].region
    stored, classes = kept(region), {class_name(type(each)): type(each) for each in fused.modules()}
    again = made_region(stored, region.call, region.example, classes)
    assert again.lost_gradients == region.lost_gradients == {"p_up_weight", "p_up_bias", "x"}
    del stored["lost_gradients"]
    with pytest.raises(Unstorable, match="which gradients"):
        made_region(stored, region.call, region.example, classes)
