"""Equal calls are computed once, unless the program returns or draws their results."""

import dis

import pytest
import torch
from torch import nn

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
