"""Training a converted model: it learns what the original learns, and eval() afterwards sees the new weights."""

import copy

import pytest
import torch
from support import stateful_models
from support.selection import each_once, exhaustive
from support.small_models import Gate, assert_valid, cnn, convert, guard, inputs_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert.accuracy.comparison import ERROR_RATIO
from kfconvert.runtime.dispatch.guarded import IN_TRAINING
from kfconvert.runtime.state.model_state import ModelState


def loss(model: nn.Module, inputs: dict | None = None) -> Tensor:
    """A scalar that depends on every logit."""
    outputs = model(**(inputs or inputs_of(model, batch=4, seed=1)))
    logits = (outputs if isinstance(outputs, Tensor) else outputs.logits).float()
    return F.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % logits.shape[-1])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 3) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def gradients(model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_values(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert list(expected) == list(actual)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)


def assert_gradients_as_accurate(original: nn.Module, fused: nn.Module) -> None:
    """Every gradient of ``fused`` is as close to the one in float64 as that of ``original``."""
    exact = gradients(copy.deepcopy(original).double())
    own, found = gradients(original), gradients(fused)
    assert list(found) == list(own) == list(exact)
    for name, reference in exact.items():
        scale = reference.abs().max()
        allowed = max(ERROR_RATIO * (own[name] - reference).abs().max(), 1e-6 * scale)
        assert (found[name] - reference).abs().max() <= allowed, name


# Gradients


def test_gradients_in_eval_mode(original, fused):
    assert_gradients_as_accurate(original, fused)
    assert guard(fused)["hits"] and not guard(fused)["misses"]


class Recurrent(nn.Module):
    def __init__(self, kind: type, **options):
        super().__init__()
        self.recurrent = kind(8, 16, batch_first=True, **options)
        self.head = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


@each_once(kind=(nn.LSTM, nn.GRU, nn.RNN), options=({}, {"num_layers": 2, "dropout": 0.5}))
def test_gradients_of_recurrent_layers(kind, options):
    original = Recurrent(kind, **options).eval()
    inputs = {"x": torch.randn(4, 6, 8)}
    fused = convert(original, example_inputs=inputs, effort="fast")
    for model in (original, fused):
        loss(model, inputs).backward()
    for (name, ours), theirs in zip(fused.named_parameters(), original.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert guard(fused) == {"hits": 1, "misses": {}}


def test_numerical_derivatives():
    """Of first and second order, in eval mode, where the fused forward runs."""
    fused = convert(cnn().double(), effort="fast")
    images = inputs_of(fused)["x"].requires_grad_()
    assert torch.autograd.gradcheck(fused, images, fast_mode=True)
    assert torch.autograd.gradgradcheck(fused, images, fast_mode=True)
    assert guard(fused)["hits"] and not guard(fused)["misses"]


@pytest.mark.parametrize("create_graph", [False, True])
def test_inputs_that_depend_on_each_other_and_on_weights(create_graph):
    original, x = Gate(), torch.randn(3, 6)
    fused = convert(original, example_inputs=(x, x), effort="fast")
    found = []
    for model in (original, fused):
        weight, leaf = model.linear.weight, x.clone().requires_grad_()
        for given in ((leaf, leaf), (leaf, leaf.sin()), (leaf, weight[:3])):
            first = torch.autograd.grad(model(*given).square().sum(), [leaf, weight], create_graph=create_graph)
            second = torch.autograd.grad(first[0].square().sum(), [leaf, weight]) if create_graph else ()
            found.append([*first, *second])
    torch.testing.assert_close(found[:3], found[3:])
    assert guard(fused)["hits"] == 3


def test_frozen_parameters_stay(original, fused):
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    for model in (original, fused):
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
        step(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))
    changed = [name for name, value in fused.named_parameters() if not torch.equal(value, before[name])]
    assert changed == [name for name, p in fused.named_parameters() if p.requires_grad]
    assert_valid(original, fused)


# Modes


def dispatched(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """The operators of a whole training step, in their order."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names():
        outputs = model(*inputs)
        (outputs if isinstance(outputs, Tensor) else outputs["logits"]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return names


@pytest.mark.parametrize("name", ["blocks", "cnn", *exhaustive("attention", "llama")])
def test_a_training_step_makes_the_calls_of_the_original_and_looks_at_nothing(name, monkeypatch):
    original = stateful_models.MAKERS[name]()
    inputs = stateful_models.arguments(original)
    fused = convert(original, example_inputs=inputs, validate_accuracy=False).train()
    assert dispatched(fused, inputs) == dispatched(original.train(), inputs)
    monkeypatch.setattr(ModelState, "change", lambda self: pytest.fail("the state of the model was looked at"))
    before = fused.kfconvert_info()
    fused(*inputs)
    after = fused.kfconvert_info()
    for one, other in zip((before["guard"], *before["parts"].values()), (after["guard"], *after["parts"].values())):
        assert other["hits"] == one["hits"] == 0
        assert set(other["misses"]) <= {IN_TRAINING}
    counts = [sum(each["misses"].values()) for each in (after["guard"], *after["parts"].values())]
    assert max(counts) == 2 and 0 not in counts[name == "blocks" :]


# Optimizers


def test_an_optimizer_made_after_the_conversion(original, fused):
    with torch.no_grad():
        loss(fused)  # weights are folded and packed now, and must be again after the steps
    for model in (original.train(), fused.train()):
        update = torch.optim.AdamW(model.parameters(), lr=0.05)
        for seed in (1, 2, 3):
            step(model, update, seed)
    assert_same_values(dict(original.state_dict()), dict(fused.state_dict()))
    assert_valid(original.eval(), fused.eval())
    assert guard(fused)["hits"]


# Mixed precision and recomputation


@pytest.mark.filterwarnings("ignore:kfconvert.*autocast:RuntimeWarning")
def test_autocast(original, fused):
    found = []
    for model in (original, fused):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(model))
    assert_same_values(*found)
