"""Whole models are measured as they are used for inference, and left as they were."""

import pytest
import torch
from torch import nn

from kfconvert.profiling import profile_model_inference


class Watched(nn.Module):
    """Notes in which mode each forward runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.seen = []

    def forward(self, x, scale=1.0):
        self.seen.append((self.training, torch.is_grad_enabled()))
        return {"out": torch.rand(()) * self.frozen(self.linear(x)) * scale}


def test_evaluation_mode_without_gradients_and_all_is_put_back():
    model, state = Watched(), torch.get_rng_state()
    measurement = profile_model_inference(model, torch.ones(2, 4), warmup=1, repeat=3)
    assert model.seen == [(False, False)] * 5 and measurement.repeat == 3
    assert model.training and model.linear.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_parameters_buffers_inputs_and_outputs_are_moved():
    inputs = {"x": torch.ones(2, 4), "scale": 2.0}
    measurement = profile_model_inference(Watched(), inputs, warmup=0, repeat=1)
    parameters = (16 + 4 + 4 + 4) * 4
    buffers = (4 + 4) * 4 + 8
    assert measurement.bytes_moved == parameters + buffers + 32 + 32


def test_flags_are_put_back_after_an_error():
    model = Watched()
    with pytest.raises(RuntimeError):
        profile_model_inference(model, torch.ones(2, 3))
    assert model.training and not model.frozen.training


def test_bad_arguments():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not builtin_function_or_method"):
        profile_model_inference(torch.relu, torch.ones(1))
    with pytest.raises(ValueError, match="repeat must be at least 1"):
        profile_model_inference(nn.ReLU(), torch.ones(1), repeat=0)
    with pytest.raises(TypeError, match="inputs must be"):
        profile_model_inference(nn.ReLU(), None)


@pytest.mark.cuda
def test_on_a_gpu():
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
    x = torch.randn(64, 256, device="cuda")
    measurement = profile_model_inference(model, x, warmup=1, repeat=3)
    assert measurement.device == str(x.device) and measurement.copy_share > 0
    assert measurement.launches >= 3  # a product may take more than one
    assert measurement.peak_bytes >= 64 * 256 * 4
