"""Forwards that ask of which class a module or an object is get the answer in a trace that they get otherwise."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


DEFAULT, LARGE = Settings(), Settings(5.0)
QUESTIONS = {
    "equal settings": lambda model: model.settings == DEFAULT,
    "class of the settings": lambda model: type(model.settings) is Settings,
    "class of a module": lambda model: type(model.act) is nn.GELU,
    "the model itself": lambda model: type(model) is Asking,
}


class Asking(nn.Module):
    def __init__(self, ask, settings=None):
        super().__init__()
        self.linear, self.act, self.settings, self.ask = nn.Linear(16, 16), nn.GELU(), settings or Settings(), ask

    def forward(self, x):
        y = self.act(self.linear(x))
        return y * 2 if self.ask(self) and x.shape[0] > 16 else y


def convert(model):
    return ModelConverter(select="all", validate_accuracy=False, effort="fast").convert_model(
        model, example_inputs=torch.randn(4, 16)
    )


def assert_alike(model, fused):
    for rows in (4, 32):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_that_of_a_plain_call(name):
    model = Asking(QUESTIONS[name]).eval()
    fused = convert(copy.deepcopy(model))
    assert_alike(model, fused)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


def test_what_a_comparison_reads_is_recorded():
    model = Asking(lambda model: model.settings == LARGE).eval()
    fused = convert(copy.deepcopy(model))
    assert_alike(model, fused)
    model.settings.scale = fused.settings.scale = 5.0
    assert_alike(model, fused)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, dataclasses.replace])
def test_what_is_read_of_a_copy_is_recorded(copied):
    model = Asking(lambda model: copied(model.settings).scale > 3).eval()
    fused = convert(copy.deepcopy(model))
    assert_alike(model, fused)
    model.settings.scale = fused.settings.scale = 5.0
    assert_alike(model, fused)
