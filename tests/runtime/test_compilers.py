"""torch.compile, torch.export and torch.jit.trace of converted models: the original forward, and one warning."""

import copy
import warnings

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter


class Branching(nn.Module):
    """Its two linear layers are captured, it is not. (batch, 8) -> (batch, 8)"""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x) if x.shape[0] < 100 and float(x.detach().sum()) < 1e9 else x


def whole():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()


def convert(model):
    return ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, input_shape=(2, 8))


@pytest.fixture(scope="module")
def converted_once():
    model = whole()
    return model, convert(model)


@pytest.fixture
def pair(converted_once):
    return copy.deepcopy(converted_once)


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    """Dynamo uses what it compiled for one model for others of the same structure."""
    torch._dynamo.reset()


def traced_by_jit(model, x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        return torch.jit.trace(model, x)


WAYS = {
    "compile": lambda model, x: torch.compile(model, backend="eager", fullgraph=True),
    "compile in place": lambda model, x: model.compile(backend="eager") or model,
    "export": lambda model, x: torch.export.export(model, (x,), strict=False).module(),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "jit.trace": traced_by_jit,
}
X = torch.randn(2, 8)


def warned(recorded):
    """The warnings about compilers. (torch.jit.trace also calls the model itself, for a comparison.)"""
    return [str(warning.message) for warning in recorded if "get the original forward of" in str(warning.message)]


def gradients(owner, call):
    owner.zero_grad()
    call(X).square().sum().backward()
    return [parameter.grad for parameter in owner.parameters()]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_gets_the_original_and_one_warning_says_so(way, pair, recwarn):
    model, fused = pair
    with torch.no_grad():
        traced = WAYS[way](fused, X)
        for _ in range(3):
            torch.testing.assert_close(traced(X), model(X))
        (message,) = warned(recwarn)
        assert "forward of Sequential, without its fusions" in message and "\n" not in message
        recwarn.clear()
        WAYS[way](fused, X)(X)
        assert not warned(recwarn)


@pytest.mark.filterwarnings("always")
def test_parts_warn_once_together(recwarn):
    fused = convert(Branching().eval())
    assert fused.kfconvert_info()["parts"]
    compiled = torch.compile(fused, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), fused.layers(X))
    assert len(warned(recwarn)) == 1


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "strict export"])
def test_nothing_is_lost_in_train_mode(way, pair, recwarn):
    _, fused = pair
    WAYS[way](fused.train(), X)(X)
    assert not warned(recwarn)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_compiled_model_is_trained_and_changed_as_its_original(pair):
    model, fused = pair
    compiled = torch.compile(fused, backend="aot_eager")
    torch.testing.assert_close(gradients(fused, compiled), gradients(model, model))
    for each in (model, fused):
        torch.manual_seed(0)
        each[1] = nn.ReLU()
        each[2].weight = nn.Parameter(torch.randn(8, 16))
        each[0].register_forward_hook(lambda module, args, output: output * 2)
    torch._dynamo.reset()  # Dynamo does not detect hooks that are registered after a compilation
    torch.testing.assert_close(compiled(X), model(X))
    torch.testing.assert_close(gradients(fused, compiled), gradients(model, model))


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "compile in place"])
def test_the_converted_model_itself_keeps_its_program(way, pair):
    model, fused = pair
    with torch.no_grad():
        fused(X)
        WAYS[way](fused, X)(X)
        hits = fused.kfconvert_info()["guard"]["hits"]
        for each in (fused, copy.deepcopy(fused)):
            torch.testing.assert_close(each(X), model(X))
            assert each.kfconvert_info()["guard"] == {"hits": hits + 1, "misses": {}}
