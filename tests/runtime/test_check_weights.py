"""Writes to weights that leave no trace: found at a refresh, and within N calls where ``check_weights=N``."""

import copy
from functools import cache

import pytest
import torch
from support import stateful_models
from support.selection import each_once, pairwise
from support.state_changes import CHANGES, Alike, Subject
from test_state_changes import alike
from torch import nn

import kfconvert
from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = 4
UNANNOUNCED = [title for title, change in CHANGES.items() if not change.announced]
NAMES = ("attention", "blocks", "cnn")


def arguments(name: str, seed: int = 0) -> tuple:
    return stateful_models.arguments(stateful_models.MAKERS[name](), seed)


@cache
def _converted(name: str) -> nn.Module:
    converter = ModelConverter(validate_accuracy=False, select="all", check_weights=EVERY)
    return converter.convert_model(stateful_models.MAKERS[name](), example_inputs=arguments(name))


def pair(name: str) -> Alike:
    models = stateful_models.MAKERS[name](), copy.deepcopy(_converted(name))
    return Alike(*(Subject(model, lambda seed: arguments(name, seed)) for model in models))


def written(both: Alike, title: str, place: int) -> None:
    """Written without a word: no refresh follows."""
    for subject in both.both:
        torch.manual_seed(0)
        targets = CHANGES[title].targets(subject.model)
        CHANGES[title].apply(subject, targets[place % len(targets)])


@pairwise(name=NAMES, title=UNANNOUNCED, place=[0, -1, 3])
def test_an_unannounced_write_is_found_within_so_many_calls(name, title, place):
    both = pair(name)
    for _ in range(EVERY + 1):  # the writes come at different distances from a check
        both.call("before the write")
    for distance in range(2):
        written(both, title, place)
        for _ in range(EVERY):
            both.converted.call()
        both.call("after it")
        for _ in range(distance):
            both.call("once more")


def test_single_and_exchanged_elements_are_found():
    """No element is left out of the fingerprint; a sum would not detect an exchange."""
    both = pair("cnn")
    both.call("before")
    weights = [subject.model.conv2.weight.data for subject in both.both]
    for index in (*range(0, weights[0].numel(), 97), None):
        for each in weights:
            if index is None:
                each.copy_(each.flip(0))
            else:
                each.view(-1)[index] += 3.0
        for _ in range(EVERY):
            both.converted.call()
        both.call(f"after element {index} was written")


@each_once(name=NAMES, title=UNANNOUNCED)
def test_a_refresh_finds_every_write(name, title):
    """Without ``check_weights``; in the table each is made at some places, here at all."""
    both = alike(name)
    count = len(CHANGES[title].targets(both.original.model))
    both.call("before")
    for place in range(count):
        both.apply(CHANGES[title], seed=place)
        both.call(f"after a write to parameter {place}")


@pytest.mark.parametrize("wrong", [-1, 1.5, "often", True])
def test_other_values_are_refused(wrong):
    with pytest.raises(kfconvert.ConversionError, match="check_weights"):
        ModelConverter(check_weights=wrong)
