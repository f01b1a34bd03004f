"""Forwards that ask whether somebody traces them, whatever way the question takes."""

import copy

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling as under_another_name
from transformers.utils.import_utils import is_tracing

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(4, 16)
QUESTIONS = {
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "imported under another name": lambda x: under_another_name(),
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

    def rest(self, x):
        return self.norm(nn.functional.gelu(self.linear(x)))

    def forward(self, x):
        return self.rest(self.way(self, x))


class Plain(Net):
    def forward(self, x):
        return self.rest(x)


WAYS = {name: lambda net, x, asked=asked: limited(x, asked) for name, asked in QUESTIONS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_done_for_compilers_only_is_in_no_program(name):
    model = Net(WAYS[name]).eval()
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


@pytest.mark.parametrize("padding", ["none", "right"])
def test_an_encoder_gives_zeros_where_later_masks_pad(padding):
    model = Encoder().eval()
    x, mask = torch.randn(3, 7, 16), torch.zeros(3, 7, dtype=torch.bool)
    if padding != "none":
        mask[0, 5:] = True
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
