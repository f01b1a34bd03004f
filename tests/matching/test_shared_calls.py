"""Equal calls are computed once, unless the program returns or draws their results."""

import copy
import dis

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.capture.captured import capture
from kfconvert.inputs.example import ExampleCall


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def changed(x, y):
    one = x.sin()
    one.add_(1)
    return one * x.sin() + y


def changed_argument(x, y):
    z = x * y
    one = z.sin()
    z.add_(1)
    return one + z.sin()


def views(x, y):
    one, other = x.sin(), x.sin()
    return one[0] + y, other.t()


def with_statistics(x, y):
    mean = x.mean(0) * 0
    one, before = nn.functional.batch_norm(x, mean, mean + 1, training=True), mean.sin()
    other, after = nn.functional.batch_norm(x, mean, mean + 1, training=True), mean.sin()
    return one + other + y, before + after


# For each function, the number of calls of sin or rand.
FUNCTIONS = {
    "equal": (lambda x, y: (x.sin() + y) * (x.sin() - y), 1),
    "chains": (lambda x, y: (x.sin().cos() + y) * (x.sin().cos() - y), 1),
    "other arguments": (lambda x, y: (x.sin() + y) * (y.sin() - y), 2),
    "returned": (lambda x, y: (x.sin(), x.sin()), 2),
    "views of returned values": (views, 2),
    "written": (changed, 1),
    "written arguments": (changed_argument, 2),
    "drawn": (lambda x, y: torch.rand_like(x).sin() - torch.rand_like(x).sin() + y, 2),
    "statistics of a norm": (with_statistics, 2),
    "other numbers": (lambda x, y: (x * 2).sin() + (x * 3).sin() + y, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_calls_are_computed_once(name):
    function, count = FUNCTIONS[name]
    model = Model(function).eval()
    inputs = torch.randn(3, 3), torch.randn(3, 3)
    program = capture(model, "", ExampleCall(inputs), [{}]).variant(()).program
    assert sum("sin" in instruction for instruction in names_called(program.code)) == count
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(*inputs)
        torch.manual_seed(0)
        found = program.run(list(inputs))
        expected = expected if isinstance(expected, tuple) else (expected,)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        pointers = [each.untyped_storage().data_ptr() for each in found]
        assert len(set(pointers)) == len(pointers)


def names_called(code):
    return [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL") and isinstance(instruction.argval, str)
    ]


class Images(nn.Module):
    """Reads an image before and after a write that reaches it through a view."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x, factor):
        y = self.norm(self.conv(x)).relu()
        before = y.sin()
        y.view(-1).mul_(factor)
        return before * 2 + y.sin()


def test_an_image_in_another_layout_is_read_before_and_after_a_write():
    torch.manual_seed(0)
    model, x = Images().double().eval(), torch.randn(2, 3, 8, 8).double()
    expected = copy.deepcopy(model)
    converter = ModelConverter(select="all", effort="fast")
    converted = converter.convert_model(model, example_inputs=(x, torch.ones(1).double()))
    factor = torch.full((1,), 3.0).double()
    with torch.no_grad():
        torch.testing.assert_close(converted(x, factor), expected(x, factor))
