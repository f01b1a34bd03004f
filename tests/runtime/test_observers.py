"""What looks on while a converted model runs sees what it sees of the original: hooks, modes, counters."""

import copy
from collections import Counter

import pytest
import torch
from support.state_changes import Subject
from test_state_changes import alike
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("attention", "blocks")


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


def test_a_hook_in_the_place_of_an_idle_one():
    def idle(module, inputs, output):
        return None

    idle.__module__ = "transformers.utils.output_capturing"  # whose hooks do nothing unless they are asked to
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    handle = model[0].register_forward_hook(idle)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), example_inputs=torch.randn(3, 16)
    )
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        fused[0]._forward_hooks.pop(handle.id)
        fused[0].register_forward_hook(lambda module, inputs, output: output * 2)
        torch.testing.assert_close(fused(x), torch.relu(model[0](x) * 2))
    assert fused.kfconvert_info()["guard"]["hits"] == 1
