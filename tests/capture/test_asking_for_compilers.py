"""Forwards that ask whether somebody traces them, whatever way the question takes."""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling as under_another_name
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.import_utils import is_tracing

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(4, 16)
QUESTIONS = {
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "imported under another name": lambda x: under_another_name(),
    "by transformers": lambda x: is_torchdynamo_compiling(),
    "by transformers, of the tensor": lambda x: is_tracing(x),
}


def limited(x, asked=QUESTIONS["is_compiling"]):
    if not asked(x) and bool((x > 10).any()):  # too large values are dealt with, but for compilers
        x = x.clamp(max=10)
    return x


class Net(nn.Module):
    def __init__(self, way=None):
        super().__init__()
        self.linear, self.norm, self.way = nn.Linear(16, 16), nn.LayerNorm(16), way or (lambda net, x: limited(x))
        self.functions = {"a": limited}

    def rest(self, x):
        return self.norm(nn.functional.gelu(self.linear(x)))

    def forward(self, x):
        return self.rest(self.way(self, x))


class Plain(Net):
    def forward(self, x):
        return self.rest(x)


WAYS = {"a function in a dict": lambda net, x: net.functions["a"](x)} | {
    name: lambda net, x, asked=asked: limited(x, asked) for name, asked in QUESTIONS.items()
}


def own_forward():
    model = Plain()
    model.forward = types.MethodType(lambda self, x: self.rest(limited(x)), model)
    return model


def own_forward_within():
    model = Net(lambda net, x: net.inner(x))
    model.inner = nn.Identity()
    model.inner.forward = limited
    return model


MODELS = {name: functools.partial(Net, way) for name, way in WAYS.items()} | {
    "a forward on the instance": own_forward,
    "a forward on a submodule": own_forward_within,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_done_for_compilers_only_is_in_no_program(name):
    model = MODELS[name]().eval()
    fused = ModelConverter(select="all", validate_accuracy=False, effort="fast").convert_model(
        copy.deepcopy(model), example_inputs=X
    )
    for x in (X, 30 * X):
        torch.testing.assert_close(fused(x), model(x))


def test_a_question_that_is_not_asked_costs_no_fusion():
    class Asks(Net):
        def forward(self, x):
            return self.rest(limited(x) if self.training else x)

    model = Asks().eval()
    fused = ModelConverter(select="all", validate_accuracy=False, effort="fast").convert_model(
        copy.deepcopy(model), example_inputs=X
    )
    torch.testing.assert_close(fused(X), model(X))
    assert fused.kfconvert_info()["guard"]["hits"] == 1


def test_an_answer_is_the_same_after_a_conversion():
    before = torch.compiler.is_compiling.__code__
    ModelConverter(select="all", validate_accuracy=False, effort="fast").convert_model(Plain().eval(), example_inputs=X)
    assert torch.compiler.is_compiling.__code__ is before
    assert not torch.compiler.is_compiling()


class Encoder(nn.Module):
    """Of PyTorch's own modules this one asks: it puts zeros where a mask pads at the right, but for compilers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x, mask=None):
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_an_encoder_gives_zeros_where_later_masks_pad(padding):
    model = Encoder().eval()
    x, mask = torch.randn(3, 7, 16), torch.zeros(3, 7, dtype=torch.bool)
    if padding != "none":
        mask[0, slice(0, 2) if padding == "left" else slice(5, None)] = True
    fused = ModelConverter(select="all").convert_model(model, example_inputs=(x, mask))
    later = torch.arange(7) >= torch.tensor([[3], [7], [5]])
    with torch.no_grad():
        for each in (mask, later, mask | later):
            torch.testing.assert_close(fused(x, each), model(x, each), equal_nan=True)


def test_an_encoder_without_a_mask_is_captured_as_a_whole():
    model, x = Encoder().eval(), torch.randn(3, 7, 16)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    guard = fused.kfconvert_info()["guard"]
    assert guard["hits"] >= 1 and not guard["misses"]
