import copy
import pickle

import pytest
import torch
from torch import nn

from kfconvert.modules import Derived


def swap(parameters):
    parameters[0] = nn.Parameter(parameters[0].data)


def swap_data(parameters):
    parameters[0].data = parameters[0].data.clone()


def write(parameters):
    with torch.no_grad():
        parameters[0].add_(1)


def convert_and_back(parameters):
    parameters[0].data = parameters[0].data.half()
    parameters[0].data = parameters[0].data.float()


def drop(parameters):
    parameters.pop()


@pytest.mark.parametrize("change", [swap, swap_data, write, convert_and_back, drop])
def test_forgets_when_a_source_changes(change):
    derived, parameters = Derived(), [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    values = derived.values(parameters)
    values["sum"] = 2
    assert derived.values(tuple(parameters)) is values
    change(parameters)
    assert derived.values(parameters) == {}


def test_inference_tensors_are_followed_by_identity():
    with torch.inference_mode():
        sources = [torch.ones(3), torch.ones(3)]
    derived = Derived()
    values = derived.values(sources)
    assert derived.values(sources) is values
    sources[0] = sources[0].clone()
    assert derived.values(sources) is not values


def test_no_sources_and_clear():
    derived = Derived()
    values = derived.values(())
    assert derived.values(()) is values
    derived.clear()
    assert derived.values(()) is not values


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda derived: pickle.loads(pickle.dumps(derived))])
def test_copies_are_empty(duplicate):
    derived, source = Derived(), torch.ones(3)
    derived.values([source])["x"] = 1
    assert duplicate(derived).values([source]) == {}
