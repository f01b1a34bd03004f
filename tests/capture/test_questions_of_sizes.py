"""Code that reads free sizes: a served call returns the model's outputs."""

import copy
import math
import warnings

import numpy
import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.capture import Capture, capture_form
from kfconvert.inputs import ExampleCall

# (batch size, length); the converter sees the first.
SIZES = [(4, 6), (1, 3), (1, 5), (2, 5), (3, 1), (4, 1), (1, 1), (4, 3), (1, 6), (3, 4), (4, 12), (10, 6)]


def nested(x):
    if x.shape[0] == 1:
        if x.shape[1] == 3:
            return 2.0
    return 1.0


def loop(x):
    for size, other in zip(x.shape, (1, 3)):
        if size != other:
            return 1.0
    return 2.0


def halvings(x):
    count, size = 0, x.shape[0] * x.shape[1]
    while size > 1:
        size, count = size // 2, count + 1
    return 1.0 + count


def caught(x):
    try:
        return {4: 2.0, 3: 5.0}[x.shape[0]]
    except (KeyError, TypeError):
        return 1.0


ASKED = {
    "dict": lambda x: {1: 2.0, 3: 4.0}.get(x.shape[1], 0.5),
    "dict, errors caught": caught,
    "set of sizes": lambda x: float(len({*x.shape})),
    "dict of answers": lambda x: {True: 2.0, False: 0.5}[x.shape[1] > 3],
    "length of text": lambda x: float(len(str(x.shape[1]))),
    "f-string": lambda x: 2.0 if f"{x.shape[1]}" == "3" else 1.0,
    "text of torch.Size": lambda x: 2.0 if "[1, 3]" in str(x.shape) else 1.0,
    "shape in a list": lambda x: 2.0 if tuple(x.shape) in [(1, 3), (2, 5)] else 1.0,
    "shape": lambda x: 2.0 if x.shape == (1, 3) else 1.0,
    "bitwise and": lambda x: 2.0 if (x.shape[0] == 1) & (x.shape[1] == 3) else 1.0,
    "limit by a size of one": lambda x: x.clamp(max=3 if x.shape[0] == 1 else 100).float().mean(),
    "nested": nested,
    "loop": loop,
    "product": lambda x: 2.0 if math.prod(x.shape) in (3, 5) else 1.0,
    "list by an answer": lambda x: [1.0, 2.0][x.shape[0] == 1],
    "list by a size": lambda x: (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)[x.shape[1] % 8],
    "range": lambda x: float(len(range(x.shape[1]))),
    "sqrt": lambda x: math.floor(math.sqrt(x.shape[1])) * 1.0,
    "halvings": halvings,
    "numpy": lambda x: float(numpy.prod(numpy.array(x.shape)) % 7),
    "truth": lambda x: 2.0 if x.shape[0] - 1 else 1.0,
    "isinstance": lambda x: 2.0 if isinstance(x.shape[1], int) else 1.0,
    "transposed": lambda x: 2.0 if x.t().is_contiguous() else 1.0,
    "stride of a slice": lambda x: 2.0 if x[:, :1].is_contiguous() else 1.0,
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, input_ids):
        return torch.relu(input_ids.float()) * ASKED[self.name](input_ids)


@pytest.mark.parametrize("name", ASKED)
@torch.no_grad()
def test_served_calls_are_right(name):
    model, example = Net(name).eval(), torch.randint(1, 20, SIZES[0])
    captured = capture_form(model, ExampleCall((example,), {}))
    assert isinstance(captured, Capture)  # with all sizes fixed, if need be
    for size in SIZES:
        ids = torch.randint(1, 20, size)
        if captured.region.guard.refusal([ids]) is None:
            torch.testing.assert_close(captured.variant(()).run([ids]), model(ids), msg=str(size))


class Fused(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.embedding, self.linear, self.asks = nn.Embedding(20, 8), nn.Linear(8, 8), asks

    def forward(self, input_ids):
        return torch.relu(self.linear(self.embedding(input_ids))) * self.asks(input_ids)


HARMLESS = {
    "nothing": lambda x: 1.0,
    "one sequence": lambda x: float((x.shape[1] > 1 and x.dim() > 1) is not None),
    "shapes of two tensors": lambda x: 1.0 if x.shape == (x + 1).shape else 2.0,
    "lower limit": lambda x: 1.0 if x.shape[1] < 100 else 2.0,
    "message": lambda x: torch._check(x.shape[1] < 100, f"{x.shape[1]} is long") or 1.0,
    "warning": lambda x: x.shape[1] > 99 and warnings.warn(f"{x.shape[1]} is long") or 1.0,
}


@pytest.mark.parametrize(
    ("name", "example"), [*((name, SIZES[0]) for name in HARMLESS), ("one sequence", (1, 6))], ids=str
)
def test_questions_that_decide_nothing_fix_no_size(name, example):
    model = Fused(HARMLESS[name]).eval()
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast")
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=torch.randint(20, example))
    with torch.no_grad():
        for ids in (torch.randint(20, size) for size in SIZES):
            torch.testing.assert_close(fused(ids), model(ids), msg=str((tuple(ids.shape), ids.stride())))
    assert fused.kfconvert_info()["guard"]["hits"] == len(SIZES)
