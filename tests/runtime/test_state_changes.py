"""Changes of a model's state between two calls: the converted model does what the original, treated alike, does."""

import copy
from functools import cache

import pytest
import torch
from support import small_models, stateful_models
from support.state_changes import CHANGES, Alike, Subject, difference
from torch import nn
from torch.utils import _pytree as pytree

from kfconvert.conversion.steps import merge_weights
from kfconvert.runtime import guarded_forward

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def original(name: str) -> nn.Module:
    return stateful_models.MAKERS[name]()


@cache
def converted(name: str) -> nn.Module:
    model = original(name)
    example = stateful_models.arguments(model)
    return small_models.convert(copy.deepcopy(model), example_inputs=example, validate_accuracy=False)


def alike(name: str) -> Alike:
    """A copy of a model and of its conversion."""

    def arguments(seed: int) -> tuple:
        return stateful_models.arguments(original(name), seed)

    fused = copy.deepcopy(converted(name))
    # As in a model that was just converted; in a copy each weight has separate memory.
    forwards = {path: guarded_forward(module) for path, module in fused.named_modules()}
    merge_weights(fused, {path: forward.variants for path, forward in forwards.items() if forward})
    return Alike(Subject(copy.deepcopy(original(name)), arguments), Subject(fused, arguments))


# How the change is made, each time at another of its places: between two calls, in train mode, where no call is made,
# or by another thread.
MODES = ("eval", "train", "thread")


def _cases() -> list:
    """Every change with every model that has a place for it; in a short run with the first of these. Changes of weights
    are made in each of the modes in turn, as the mode decides what detects them."""
    cases = []
    for index, (title, change) in enumerate(CHANGES.items()):
        names = [name for name in stateful_models.MAKERS if change.targets(original(name))]
        modes = MODES if change.threads else MODES[:2]
        for number, name in enumerate(names if change.cheap else names[:1]):
            mode = modes[index % len(modes)] if change.hits and number == 0 else "eval"
            marks = pytest.mark.exhaustive if number else ()
            cases.append(pytest.param(name, title, mode, id=f"{title}-{name}-{mode}", marks=marks))
    return cases


@pytest.mark.parametrize("name, title, mode", _cases())
def test_a_change_between_two_calls(name, title, mode):
    change, both = CHANGES[title], alike(name)
    before = both.call("before the change")
    served = both.hits()  # by the program of the model, or by those of its parts
    assert served
    if mode == "train":
        both.each(nn.Module.train)
    undo = both.apply(change, seed=MODES.index(mode), thread=mode == "thread")
    try:
        if mode == "train":
            both.each(nn.Module.eval)
        after = both.call("after the change")
        if change.visible and mode == "eval":  # not each of its places shows: a key's bias does not
            assert is_another(after, before), "the change shows in no output: it tests nothing"
        hits = both.hits()
        both.call("another call after the change", seed=1)
        if change.hits:
            assert both.hits() == hits + served, "the fused program is no longer used"
        if change.gradients:
            both.compare_gradients("after the change")
    finally:
        if undo is not None:
            undo()
            both.each(nn.Module.eval)
    both.call("after it was undone")
    hits = both.hits()
    both.call("another call after it was undone", seed=1)
    if undo is not None and (change.hits or change.returns):
        assert both.hits() == hits + served, "the fused program is not used again"


def is_another(after, before) -> bool:
    """Whether the outputs differ by more than rounding makes them."""
    if isinstance(after, Exception) or isinstance(before, Exception):
        return type(after) is not type(before)
    pairs = list(zip(pytree.tree_leaves(after), pytree.tree_leaves(before)))
    return any(a.shape != b.shape or difference(a, b) > 1e-3 for a, b in pairs if isinstance(a, torch.Tensor))
