"""Operators that raise in a call: what the original does then, which may catch it, the converted model does too."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


class Looking(nn.Module):
    """``look(self, ids)`` gives rows, or raises for ids that are too large."""

    def __init__(self, look):
        super().__init__()
        self.look, self.embedding, self.linear = look, nn.Embedding(10, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids):
        return self.norm(torch.relu(self.linear(self.look(self, ids))))


def plain(model, ids):
    return model.embedding(ids)


def catching(model, ids):
    try:
        return model.embedding(ids)
    except IndexError:
        return model.embedding(ids.clamp(max=9)) * 2


FITTING, LARGE = torch.arange(8).reshape(2, 4), torch.tensor([[1, 12, 3, 4], [1, 2, 3, 4]])


def converted(look):
    model = Looking(look).eval()
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return model, converter.convert_model(copy.deepcopy(model), example_inputs=(FITTING,))


def outcome(model, ids):
    torch.manual_seed(3)
    try:
        return model(ids), torch.get_rng_state()
    except Exception as error:
        return type(error), str(error)


def assert_alike(model, fused, ids):
    with torch.no_grad():
        expected, found = outcome(model, ids), outcome(fused, ids)
    if isinstance(expected[0], type):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("look", [plain, catching])
def test_the_original_decides_where_a_program_raises(look):
    model, fused = converted(look)
    assert_alike(model, fused, FITTING)
    assert fused.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}
    assert_alike(model, fused, LARGE)
    guard = fused.kfconvert_info()["guard"]
    assert guard["hits"] == 1 and list(guard["misses"].values()) == [1] and "its program raised" in str(guard["misses"])
    assert_alike(model, fused, FITTING)
    assert fused.kfconvert_info()["guard"]["hits"] == 2


def test_with_gradients():
    model, fused = converted(catching)
    for ids in (FITTING, LARGE):
        for each in (model, fused):
            each.zero_grad()
            each(ids).square().sum().backward()
        torch.testing.assert_close(fused.linear.weight.grad, model.linear.weight.grad)


CAUGHT = {"by sizes": lambda x: x.reshape(4, 8), "by strides": lambda x: x.t().view(-1)}


@pytest.mark.parametrize("name", CAUGHT)
def test_an_error_that_the_example_raises_already(name):
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.work = nn.Linear(16, 16), CAUGHT[name]

        def forward(self, x):
            try:
                self.work(x)
                scale = 2.0
            except Exception:
                scale = 3.0
            return torch.relu(self.linear(x)) * scale

    model = Trying().eval()
    converter = ModelConverter(select="all", validate_accuracy=False)
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=(torch.randn(4, 16),))
    for x in (torch.randn(4, 16), torch.randn(2, 16), torch.randn(16, 2).t()):
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x))
    assert "catches" in str(converter.conversion_stats["regions"])
