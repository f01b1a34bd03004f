"""Weights that go straight to another device: the result is that of a load on the CPU and a move."""

from pathlib import Path

import pytest
import torch
from support.devices import DEVICES
from torch import nn

from kfconvert.artifact.errors import ArtifactError
from kfconvert.artifact.weights import fill


@pytest.fixture(params=["the model's", *DEVICES])
def device(request):
    """The device of the model, and others, also on a machine without a GPU."""
    return torch.device({"the model's": "cpu", "cpu": "cpu:0"}.get(request.param, request.param))


class Turned(nn.Module):
    """A module whose file has its weight transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state, prefix, *rest):
        super()._load_from_state_dict({**state, f"{prefix}weight": state[f"{prefix}weight"].T}, prefix, *rest)


def made():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False), nn.Conv2d(3, 4, 2))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    return net.to(memory_format=torch.channels_last)


def stored(model):
    return {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}


def filled(model, tensors, device):
    fill(model, tensors, {}, Path("artifact"), device)
    return model.to(device)


def test_tensors_stay_the_same_objects_with_the_values_of_the_file(device):
    tensors, model = stored(made()), made()
    before = {key: (value, value.requires_grad, value.stride()) for key, value in model.named_parameters()}
    filled(model, tensors, device)
    assert model[0].weight is model[2].weight
    for key, value in model.named_parameters():
        own, *rest = before[key]
        assert value is own and [value.requires_grad, value.stride()] == rest
    for key, value in model.state_dict().items():
        assert value.device.type == device.type and torch.equal(value.cpu(), tensors[key])
        assert value.data_ptr() != tensors[key].data_ptr()


def test_dtypes_are_those_of_the_file(device):
    tensors = {key: value.double() if value.is_floating_point() else value for key, value in stored(made()).items()}
    model = filled(made(), tensors, device)
    for key, value in model.state_dict().items():
        assert value.dtype is tensors[key].dtype and torch.equal(value.cpu(), tensors[key])


@pytest.mark.parametrize("way", ["class", "hook"])
def test_classes_and_hooks_load_in_their_own_way(device, way):
    model = Turned() if way == "class" else nn.Linear(3, 3, bias=False)
    if way == "hook":
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(weight=state["weight"].T))
    weight = torch.randn(3, 3)
    assert torch.equal(filled(model, {"weight": weight}, device).weight.cpu(), weight.T)


def test_tensors_that_do_not_fit_are_refused(device):
    tensors = stored(made())
    wrong = [
        {**tensors, "0.weight": torch.randn(3, 4)},
        {**tensors, "0.weight": torch.ones(3, 3, dtype=torch.int64)},
        {**tensors, "0.weight": torch.zeros(3, 3)},
        {key: value for key, value in tensors.items() if key != "0.bias"},
        {**tensors, "more": torch.zeros(1)},
    ]
    for each in wrong:
        with pytest.raises(ArtifactError, match="the weights do not fit"):
            filled(made(), each, device)
