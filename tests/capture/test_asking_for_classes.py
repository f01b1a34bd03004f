"""Forwards that ask of which class a module or an object is get the answer in a trace that they get otherwise."""

import copy
import dataclasses
import threading
import types

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.process import method_over, methods_stand_over
from kfconvert.runtime import recorded_reads

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


class Reading(Settings):
    """With a way to look up attributes of its own."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


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


class Derived(nn.Linear):
    pass


def test_each_class_is_recorded_for_itself_and_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), Derived(4, 4))
    first, second = model
    first.settings, second.settings = Settings(), Reading()
    kinds = (nn.Linear, Derived, Settings, Reading, nn.Sequential)
    before = [dict(vars(kind)) for kind in kinds]
    with recorded_reads(model) as reads:
        assert (type(first), type(second)) == (nn.Linear, Derived)
        _ = first.weight, second.bias, second.settings.scale
        thread = threading.Thread(target=lambda: (first.in_features, second.out_features))
        thread.start(), thread.join()
        with pytest.raises(AttributeError):
            _ = second.absent
    assert reads == {(nn.Linear, "weight"), (Derived, "bias"), (Derived, "settings"), "scale", (Derived, "absent")}
    assert [dict(vars(kind)) for kind in kinds] == before and not methods_stand_over()


def test_a_class_that_takes_no_method_counts_as_read():
    model = nn.Linear(4, 4)
    model.settings = types.SimpleNamespace(scale=2.0)
    with recorded_reads(model) as reads:
        pass
    assert reads == {(types.SimpleNamespace, "__dict__"), "scale"}


def test_what_somebody_puts_over_the_method_meanwhile_stays():
    class Kind:
        value = 1

    def over(self, name, own=None):
        return 7 if name == "value" else object.__getattribute__(self, name)

    with method_over(Kind, "__getattribute__", lambda own: lambda self, name: own(self, name)):
        assert Kind().value == 1
        Kind.__getattribute__ = over
    assert Kind().value == 7 and vars(Kind)["__getattribute__"] is over
    with method_over(Kind, "__getattribute__", lambda own: lambda self, name: own(self, name)):
        assert Kind().value == 7
    assert vars(Kind)["__getattribute__"] is over
    with (
        pytest.raises(TypeError),
        method_over(dict, "__getattribute__", lambda own: lambda self, name: own(self, name)),
    ):
        pass
