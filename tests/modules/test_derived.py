import pytest
import torch
from torch import nn

from kfconvert.modules import Derived
from kfconvert.runtime.state import derived as implementation
from kfconvert.runtime.state.watch import COMPILED


@pytest.fixture(params=["compiled", "python"], autouse=True)
def compiled_or_python(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(implementation, "_tensor_state", implementation.tensor_state_in_python)
        monkeypatch.setattr(implementation, "_has_state", implementation.has_state_in_python)
    elif not COMPILED:
        pytest.skip("kfconvert._C was not built for this Python")


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


def append(parameters):
    parameters.append(parameters[0])


def reorder(parameters):
    parameters.reverse()


def remove(parameters):
    parameters[1] = None


def swap_contents(parameters):
    torch.utils.swap_tensors(*parameters)


@pytest.mark.parametrize(
    "change", [swap, swap_data, write, convert_and_back, drop, append, reorder, remove, swap_contents]
)
def test_forgets_when_a_source_changes(change):
    derived, parameters = Derived(), [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    values = derived.values(parameters)
    values["sum"] = 2
    assert derived.values(tuple(parameters)) is values
    change(parameters)
    assert derived.values(parameters) == {}


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_the_storage_of_a_source_is_kept_until_the_next_check(size):
    """Else the allocator gives its address to the next tensor of that size: that looks like the same source."""
    derived, source = Derived(), nn.Parameter(torch.ones(size))
    for number in range(20):
        values = derived.values([source])
        assert values == {}
        values["number"] = number
        source.data = torch.empty(0)
        source.data = torch.full((size,), float(number))


def test_errors_of_a_source_come_through():
    with pytest.raises((TypeError, AttributeError)):
        Derived().values([3])
    derived, source = Derived(), torch.ones(3)
    derived.values([source])
    if implementation._has_state is not implementation.has_state_in_python:
        with pytest.raises(TypeError):
            implementation._has_state({}, b"")
        with pytest.raises(TypeError):
            implementation._tensor_state([source])


def test_inference_tensors_are_followed_by_identity():
    with torch.inference_mode():
        sources = [torch.ones(3), torch.ones(3)]
    derived = Derived()
    values = derived.values(sources)
    assert derived.values(sources) is values
    sources[0] = sources[0].clone()
    assert derived.values(sources) is not values
