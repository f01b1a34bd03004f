"""Models whose forward writes their own state: parameters, buffers, numbers that are read later or elsewhere."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Momentum(nn.Module):
    """The weights of one block follow those of another, as in MoCo and BYOL."""

    def __init__(self, follow):
        super().__init__()
        self.query, self.key, self.follow = Block(), Block(), follow

    @torch.no_grad()
    def update(self):
        for ours, theirs in zip(self.key.parameters(), self.query.parameters()):
            self.follow(ours, theirs)

    def forward(self, x):
        self.update()
        return self.query(x) + self.key(x)


def by_data(ours, theirs):
    ours.data = ours.data * 0.9 + theirs.data * 0.1


FOLLOW = {"data": by_data, "in place": lambda ours, theirs: ours.mul_(0.9).add_(theirs, alpha=0.1)}


class Keeps(nn.Module):
    """A block that keeps something, ``kept``, and uses what it kept before."""

    def __init__(self, keep, first):
        super().__init__()
        self.block, self.keep = Block(), keep
        if isinstance(first, torch.Tensor):
            self.register_buffer("kept", first)
        else:
            self.kept = first

    def forward(self, x):
        before = self.kept
        self.keep(self, x)
        return self.block(x) + before


def copied(module, x):
    module.kept.copy_(x.mean())


KEPT = {
    "last": (lambda m, x: setattr(m, "kept", x[-1:].clone()), torch.zeros(1, 16)),
    "in place": (copied, torch.zeros(())),
    "number of rows": (lambda m, x: setattr(m, "kept", x.shape[0]), 0),
    "registered": (lambda m, x: m.register_buffer("kept", x.mean(0, keepdim=True)), torch.zeros(1, 16)),
}


class Tells(nn.Module):
    """A block that leaves a number for the forward around it, which cannot be captured."""

    def __init__(self, tell):
        super().__init__()
        self.block, self.tell = Block(), tell

    def forward(self, x):
        self.told = self.tell(x)
        return self.block(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y if y.isnan().any() else y * (self.inner.told if hasattr(self.inner, "told") else 1.0)


TOLD = {"rows": lambda x: x.shape[0], "shape": lambda x: sum(x.shape)}


class Hidden(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept


SHARED = {"kept": 0}


def items(key):
    def write(held, value):
        held[key] = value

    return lambda held: held[key], write


def named():
    return lambda held: held.kept, lambda held, value: setattr(held, "kept", value)


# What holds a value, and how it is read and written there.
HOLDERS = {
    "dict": (lambda value: {"a": value}, *items("a")),
    "deque": (lambda value: deque([value]), lambda held: held[-1], lambda held, value: held.append(value)),
    "object": (lambda value: SimpleNamespace(kept=value), *named()),
    "module in a list": (
        lambda value: [Hidden(value)],
        lambda held: held[0].kept,
        lambda held, value: setattr(held[0], "kept", value),
    ),
    "global dict": (lambda value: None, lambda held: SHARED["kept"], lambda held, value: SHARED.update(kept=value)),
}


class KeepsElsewhere(nn.Module):
    """A block that keeps something in an object that its attribute holds."""

    def __init__(self, holder, leave, later):
        super().__init__()
        make, self.read, self.write = HOLDERS[holder]
        SHARED["kept"] = 0.0
        self.block, self.leave, self.later, self.held = Block(), leave, later, make(0.0)

    def forward(self, x):
        before = self.read(self.held)
        self.write(self.held, self.leave(x))
        return self.block(x) if self.later else self.block(x) + before


class AroundElsewhere(nn.Module):
    def __init__(self, holder, leave):
        super().__init__()
        self.inner = KeepsElsewhere(holder, leave, later=True)

    def forward(self, x):
        y = self.inner(x)
        return y if y.isnan().any() else y * self.inner.read(self.inner.held)


LEFT = {"rows": lambda x: float(x.shape[0]), "mean": lambda x: x.mean()}


class TwoKinds(nn.Module):
    """Calls with inputs of one length write what those of another length read."""

    def __init__(self, leave):
        super().__init__()
        self.block, self.leave, self.kept = Block(), leave, torch.zeros(())

    def forward(self, x):
        y = self.block(x)
        if x.shape[1] > 1:
            self.kept = self.leave(x)
            return y
        return y + self.kept


class Backward(nn.Module):
    """Trains itself a little in each call, as in test-time adaptation."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        with torch.enable_grad():
            self.block(x).square().mean().backward()
        return self.block(x)


class Hyper(nn.Module):
    """The weights of a layer are assigned from what another parameter is now."""

    def __init__(self):
        super().__init__()
        self.block, self.latent = Block(), nn.Parameter(torch.randn(16))

    def forward(self, x):
        self.block.down.bias.data = self.latent.detach().round()
        return self.block(x)


class WantsGradients(nn.Module):
    """As those do that differentiate by their inputs."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x.requires_grad_(True)
        return self.block(x)


MODELS = {
    **{f"momentum by {name}": (lambda follow=follow: Momentum(follow)) for name, follow in FOLLOW.items()},
    **{f"keeps {name}": (lambda kept=kept: Keeps(kept[0], copy.deepcopy(kept[1]))) for name, kept in KEPT.items()},
    **{f"keeps {name}, within": (lambda kept=kept: Around(Keeps(kept[0], copy.deepcopy(kept[1]))))
       for name, kept in KEPT.items()},
    **{f"tells {name}": (lambda tell=tell: Around(Tells(tell))) for name, tell in TOLD.items()},
    **{f"rows in a {holder}, within": (lambda holder=holder: AroundElsewhere(holder, LEFT["rows"]))
       for holder in HOLDERS},
    # A global is the same for the original and the converted model.
    **{f"mean in a {holder}": (lambda holder=holder: KeepsElsewhere(holder, LEFT["mean"], later=False))
       for holder in HOLDERS if "global" not in holder},
    "backward": Backward,
    "assigned weights": Hyper,
}  # fmt: skip


def converted(model, **inputs):
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(model, **inputs)


def state(model):
    found = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {path: vars(module)["kept"] for path, module in model.named_modules() if "kept" in vars(module)}


def assert_same_state(actual, expected):
    ours, theirs = state(actual), state(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("name", MODELS)
def test_calls_go_on_as_those_of_the_original(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    fused = converted(copy.deepcopy(model), example_inputs=torch.randn(4, 16))
    assert_same_state(fused, model)
    for rows in (4, 2, 2, 5, 4):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), atol=1e-5, rtol=1e-5)
    assert_same_state(fused, model)
    if isinstance(model, Hyper):
        with torch.no_grad():
            model.latent.add_(3.0)
            fused.latent.add_(3.0)
            torch.testing.assert_close(fused(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_what_one_kind_of_call_writes_another_reads(leave):
    model = TwoKinds(leave).eval()
    x = torch.randn(2, 5, 16)
    fused = converted(copy.deepcopy(model), example_inputs=x)
    with torch.no_grad():
        for each in (x, x[:, :1], 2 * x[:1], x[:1, 1:2]):
            torch.testing.assert_close(fused(each), model(each), atol=1e-5, rtol=1e-5)


def test_a_conversion_in_place_leaves_gradients_as_they_were():
    model = Backward().eval()
    converted(model, example_inputs=torch.randn(4, 16), inplace=True)
    assert all(parameter.grad is None for parameter in model.parameters())


class OtherHolder(nn.Module):
    """Writes a number that only it reads, after that: nothing is left out of a graph."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        self.rows = x.shape[0]
        return self.block(x) / self.rows


def test_a_number_that_is_written_and_then_read_by_one_forward_is_part_of_its_graph():
    model = OtherHolder().eval()
    fused = converted(copy.deepcopy(model), example_inputs=torch.randn(4, 16))
    with torch.no_grad():
        for rows in (4, 3):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fused(x), model(x), atol=1e-6, rtol=1e-5)
    assert fused.kfconvert_info()["guard"]["hits"] == 2


def test_an_argument_that_the_forward_has_require_a_gradient_does():
    fused = converted(WantsGradients().eval(), example_inputs=torch.randn(4, 16))
    for _ in range(2):
        x = torch.randn(4, 16)
        fused(x).sum().backward()
        assert x.grad is not None
