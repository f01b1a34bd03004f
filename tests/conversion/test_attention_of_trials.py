"""Trial runs do without cuDNN's attention, which compiles a plan for each shape."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfconvert import ModelConverter
from kfconvert.process import without_cudnn_attention
from kfconvert.runtime import library_switches

SEEN = []  # a conversion restores what a model's attributes have


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        SEEN.append(torch.backends.cuda.cudnn_sdp_enabled())
        return nn.functional.scaled_dot_product_attention(x, x, torch.relu(self.linear(x)))


def test_a_conversion_restores_the_setting():
    model = Attention().eval()
    SEEN.clear()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    ModelConverter().convert_model(model, example_inputs=torch.randn(2, 4, 8), inplace=True)
    assert before and set(SEEN) == {True, False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_recordings_of_other_threads_stay_valid():
    before = library_switches()
    with pytest.raises(KeyError), without_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert library_switches() == before
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
def test_settings_of_the_user_stay(backend):
    with sdpa_kernel(backend):
        before = library_switches()
        with without_cudnn_attention():
            assert torch.backends.cuda.cudnn_sdp_enabled() == (backend == SDPBackend.CUDNN_ATTENTION)
        assert library_switches() == before
