"""What looks on while a converted model runs sees what it sees of the original: hooks, modes, counters."""

import copy
from collections import Counter

import pytest
import torch
from support.state_changes import Subject
from test_state_changes import alike
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("attention", "blocks")


class Seeing:
    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()


class Functions(Seeing, TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen[getattr(function, "__name__", str(function))] += 1
        return function(*args, **(kwargs or {}))


class Operators(Seeing, TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=NAMES)
def both(request):
    both = alike(request.param)
    both.call("before anybody looks on")
    return both


def counted(subject: Subject) -> int:
    with FlopCounterMode(display=False) as counter:
        subject.call()
    return counter.get_total_flops()


def test_a_counter_of_operations(both):
    first, second = (counted(subject) for subject in both.both)
    assert first == second > 0
    hits = both.hits()
    both.call("afterwards")
    assert both.hits() > hits, "the fused program is not used again"


@pytest.mark.parametrize("kind", [Functions, Operators])
@pytest.mark.parametrize("call", [Subject.call, lambda subject: subject.loss().backward()], ids=["call", "training"])
def test_modes_see_every_call(both, kind, call):
    seen = []
    for subject in both.both:
        for _ in range(2):
            with kind() as mode:
                call(subject)
        seen.append(mode.seen)
    assert seen[0] and seen[0] <= seen[1]


def test_hooks_of_modules_are_called_in_every_call(both):
    """With a call in between in which they were not there yet."""
    calls = []
    for subject in both.both:
        count = Counter()
        names = {module: name for name, module in subject.model.named_modules() if not list(module.children())}
        handles = [m.register_forward_hook(lambda m, *_: count.update([names[m]])) for m in names]
        for _ in range(3):
            subject.call()
        for handle in handles:
            handle.remove()
        calls.append(count)
    assert calls[0] and calls[0] == calls[1]
    hits = both.hits()
    both.call("afterwards")
    assert both.hits() > hits, "the fused program is not used again"


def test_hooks_that_come_with_a_copy():
    """A deep copy of a model with hooks has hooks."""
    both = alike("attention")
    both.call("before")
    both.each(lambda model: model.query.register_forward_hook(lambda m, i, o: o * 3))
    copies = [Subject(copy.deepcopy(subject.model), subject.arguments) for subject in both.both]
    torch.testing.assert_close(*(subject.call() for subject in copies))
    assert isinstance(copies[1].model, nn.Module)


def test_a_hook_in_the_place_of_an_idle_one():
    def idle(module, inputs, output):
        return None

    idle.__module__ = "transformers.utils.output_capturing"  # whose hooks do nothing unless they are asked to
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    handle = model[0].register_forward_hook(idle)
    fused = ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=torch.randn(3, 16))
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        fused[0]._forward_hooks.pop(handle.id)
        fused[0].register_forward_hook(lambda module, inputs, output: output * 2)
        torch.testing.assert_close(fused(x), torch.relu(model[0](x) * 2))
    assert fused.kfconvert_info()["guard"]["hits"] == 1
