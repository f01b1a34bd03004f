"""Gradients of calls in eval mode, when something happens between forward and backward, or to some outputs only."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head, self.second, self.scale = nn.Linear(8, 4), nn.Linear(8, 4), 2.0
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        y = self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3)) + self.shift) * self.scale
        return self.head(y), self.second(y), torch.fft.rfft(y), y.detach()


def converted(model, *example):
    return ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), example_inputs=example)


@pytest.fixture(scope="module")
def both_once():
    torch.manual_seed(0)
    model = Net().eval()
    return model, converted(model, torch.randn(2, 3, 8, 8))


@pytest.fixture
def both(both_once):
    return copy.deepcopy(both_once)


def gradients(model, between=lambda model: None, loss=lambda outputs: outputs[0].square().sum()):
    torch.manual_seed(1)
    outputs = model(torch.randn(2, 3, 8, 8))
    between(model)
    loss(outputs).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_alike(both, **options):
    expected, actual = (gradients(model, **options) for model in both)
    assert [g is None for g in actual] == [g is None for g in expected]
    for one, other in zip(actual, expected):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_train_mode_in_between(both):
    assert_alike(both, between=nn.Module.train)
    assert both[1].training and both[1].norm.num_batches_tracked == both[0].norm.num_batches_tracked


def test_outputs_that_the_loss_does_not_use(both):
    assert_alike(both)
    assert both[1].kfconvert_info()["guard"]["hits"] == 1
    x = torch.randn(2, 3, 8, 8)
    assert [o.requires_grad for o in both[1](x)] == [o.requires_grad for o in both[0](x)] == [True, True, True, False]


def test_backward_within_autocast(both):
    for model in both:
        torch.manual_seed(1)
        outputs = model(torch.randn(2, 3, 8, 8))
        with torch.autocast("cpu", torch.bfloat16):
            outputs[0].square().sum().backward()
    for one, other in zip(both[1].parameters(), both[0].parameters()):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_backward_where_parametrized_weights_are_kept():
    x = torch.randn(2, 8)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.GELU(), nn.Linear(8, 8), nn.GELU()).eval()  # the second linear is fused
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    loss = fused(x).square().sum()
    with parametrize.cached(), pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


CHANGES = {
    "attribute": lambda m: setattr(m, "scale", 5.0),
    "submodule": lambda m: setattr(m, "head", nn.Linear(8, 4)),
    "parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn(4, 8))),
    "hook": lambda m: m.conv.register_forward_hook(lambda module, inputs, output: output * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_between_are_an_error_and_never_other_gradients(both, name):
    with pytest.raises(RuntimeError, match="between forward and backward"):
        gradients(both[1], between=CHANGES[name])


def test_a_model_that_is_gone_before_backward(both):
    _, fused = both
    expected = gradients(copy.deepcopy(both[0]))
    torch.manual_seed(1)
    outputs, parameters = fused(torch.randn(2, 3, 8, 8)), list(fused.parameters())
    del fused, both
    outputs[0].square().sum().backward()
    for parameter, gradient in zip(parameters, expected):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_parts_that_are_frozen_and_trained_again():
    class Two(nn.Module):
        """Features and scores."""

        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            hidden = self.backbone(x)
            return nn.functional.gelu(hidden), self.head(hidden)

    model, x = Two().eval(), torch.randn(4, 8)
    fused = converted(model, x)
    for frozen in (True, False, True):
        found = []
        for each in (model, fused):
            each.zero_grad()
            each.backbone.requires_grad_(not frozen)
            features, scores = each(x)
            assert features.requires_grad is not frozen
            (features.sum() * features.requires_grad + scores.sum()).backward()
            found.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(*found)
    assert fused.kfconvert_info()["guard"]["hits"] == 3


class Varying(nn.Module):
    """A residual block that also returns how much its input varies, for a regulariser."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))), x.square().mean(-1)


@pytest.mark.parametrize("view", [lambda y: y[:, -1], lambda y: (y, y.view(-1))], ids=["slice", "two"])
def test_outputs_that_are_views_are_written_to(view):
    class Viewing(Varying):
        def forward(self, x):
            return view(super().forward(x)[0])

    model, x = Viewing().eval(), torch.randn(4, 8)
    fused = converted(model, x)
    found = []
    for each in (model, fused):
        outputs = each(x)
        if isinstance(outputs, tuple):
            outputs = outputs[1]
        else:
            outputs[outputs < 0] = -7.0
        outputs.sum().backward()
        found.append([outputs.detach(), *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*found)
    # Of two the one is computed from the other.
    assert fused.kfconvert_info()["guard"]["hits"] == (not isinstance(view(torch.zeros(2, 2)), tuple))


def replaced(model):
    model.scale = model.scale * 3


CHANGED = {"a buffer is replaced": replaced, "a frozen weight is written to": lambda model: model.down.weight.mul_(3)}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_tensors_that_change_before_the_backward_pass_are_an_error(change):
    class Scaled(Varying):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((8,), 2.0))

        def forward(self, x):
            return super().forward(x)[0] * self.scale

    model, x = Scaled().eval().requires_grad_(False), torch.randn(4, 8, requires_grad=True)
    fused = converted(model, x.detach())
    y = fused(x)
    with torch.no_grad():
        change(fused)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        y.sum().backward()


class Parts(nn.Module):
    """Two outputs, each by parameters of its own; ``unused`` is for none."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return torch.relu(self.second(x)), torch.relu(self.first(x))


@pytest.fixture(scope="module")
def parts_once():
    model = Parts().eval()
    return model, converted(model, torch.randn(4, 8))


@pytest.fixture
def parts(parts_once):
    return copy.deepcopy(parts_once)


@pytest.mark.parametrize("part", ["first", "second", ""])
def test_parameters_that_are_frozen_before_the_backward_pass(parts, part):
    x, found = torch.randn(4, 8), []
    for each in parts:
        y = each(x)[0]
        each.get_submodule(part).requires_grad_(False)
        y.sum().backward()
        found.append([p.grad for p in each.parameters()])
    assert parts[1].kfconvert_info()["guard"]["hits"] == 1
    assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
    torch.testing.assert_close(*([grad for grad in grads if grad is not None] for grads in found))


class Returning(nn.Module):
    """Scores, and the features that they are computed from."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        features = torch.relu(self.body(x))
        return self.head(features), features


def asked(scores, features):
    return torch.autograd.grad(scores.sum(), features)[0]


def hooked(scores, features):
    features.register_hook(lambda gradient: gradient * 10)
    (scores.sum() + 0.01 * features.sum()).backward()


@pytest.mark.parametrize("use", [asked, hooked])
def test_outputs_that_are_computed_from_each_other(use):
    model, x = Returning().eval(), torch.randn(4, 8)
    fused = converted(model, x)
    found = []
    for each in (model, fused):
        found.append((use(*each(x)), [p.grad for p in each.parameters()]))
    torch.testing.assert_close(*found)
    with torch.no_grad():
        fused(x)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


NOISE = torch.library.Library("kfconvert_tests_noise", "FRAGMENT")
NOISE.define("masked(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
NOISE.impl("masked", lambda x: x * (torch.rand(x.shape) > 0.5), "CompositeExplicitAutograd")
NOISE.impl("masked", torch.empty_like, "Meta")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.ops.kfconvert_tests_noise.masked(torch.relu(self.linear(x)))


def test_a_registered_operator_that_draws_draws_once_for_forward_and_backward():
    model = Noisy().eval()
    fused = converted(model, torch.randn(4, 6))
    x = torch.randn(4, 6)
    for module in (model, fused):
        torch.manual_seed(0)
        with torch.no_grad():
            assert module(x).count_nonzero() > 0
    assert fused.kfconvert_info()["guard"]["hits"] == 1
    for module in (model, fused):
        torch.manual_seed(0)
        outputs = module(x)
        outputs.sum().backward()
    for one, other in zip(model.parameters(), fused.parameters()):
        torch.testing.assert_close(other.grad, one.grad)


def test_an_argument_that_is_written_before_backward_is_an_error():
    """Although autograd does not save it in the original: backward computes the original again."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))

        def forward(self, x, shift):
            return self.layers(x + shift)

    fused = converted(Shifted().eval(), torch.randn(3, 8), torch.randn(8))
    x = torch.randn(3, 8)
    y = fused(x, torch.randn(8))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
