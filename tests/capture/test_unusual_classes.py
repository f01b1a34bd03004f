"""Classes whose attributes, or outputs, are of an unusual kind."""

import copy
import itertools

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter


class Inferring(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.inference_mode():
            return torch.relu(self.linear(x))


@torch.no_grad()
def test_outputs_of_inference_mode_within():
    model = Inferring().eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), input_shape=(4, 8)
    )
    x = torch.randn(4, 8)
    assert fused(x).is_inference() and model(x).is_inference()
    with torch.inference_mode():  # where all outputs are such
        again = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()), input_shape=(4, 8)
        )
        again(x)
    assert again.kfconvert_info()["guard"]["hits"] == 1


class Counting(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        return torch.relu(self.linear(x)) * next(self.steps)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_an_iterator_that_a_forward_moves_on():
    model, x = Counting(itertools.count()).eval(), torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, input_shape=(4, 8), inplace=True
    )
    assert not torch.equal(fused(x), fused(x))
    assert fused.kfconvert_info()["guard"]["hits"] == 0


class Tagged(nn.Parameter):
    """A parameter of a class of its own, as libraries for quantization and sharding have them."""

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Tagged(self.data.clone(), self.requires_grad))


@pytest.mark.parametrize("inplace", [False, True])
@torch.no_grad()
def test_a_weight_of_a_subclass_is_not_fused(inplace):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()).eval()
    model[0].weight = Tagged(model[0].weight.data)
    x = torch.randn(3, 8)
    expected = model(x)
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    converted = converter.convert_model(model, example_inputs=(x,), inplace=inplace)
    torch.testing.assert_close(converted(x), expected)
    (miss,) = [each for each in converter.conversion_stats["near_misses"] if each["module"] == "0"]
    assert "is a Tagged, not a plain tensor" in miss["reason"]
    assert {site["module"] for site in converter.conversion_stats["sites"]} == {"2", "3"}
    assert type(converted[0].weight) is Tagged
