"""Contiguous tensors that do not begin where their storage does: rows, heads and chunks cut from larger tensors."""

import pytest
import torch
from helpers import check_operator

from kfconvert import ops
from kfconvert.ops.declaration import OPERATORS


def cut(*shape):
    """A contiguous tensor of ``shape`` from the middle of a larger one."""
    return torch.randn(3, *shape)[1]


def cut_by_one(size):
    """``size`` positive elements, of which the first does not lie at a multiple of 16 bytes."""
    return torch.rand(size + 1)[1:]


CASES = {
    "linear": ("linear_act", lambda: (cut(1, 1, 16), cut(8, 16), cut(8))),
    "linear relu": ("linear_act", lambda: (cut(2, 3, 16), cut(8, 16), cut(8), "relu")),
    "last token": ("linear_act", lambda: (torch.randn(1, 7, 16)[:, -1:], cut(8, 16), None)),
    "bias": ("bias_act", lambda: (cut(4, 16), cut(16), cut(4, 16), "gelu")),
    "layer norm": ("layer_norm_act", lambda: (cut(4, 16), (16,), cut(16), cut(16), 1e-5, "none", cut(4, 16))),
    "batch norm": ("batch_norm_act", lambda: (cut(4, 16), *(cut_by_one(16) for _ in range(4)))),
    "convolution": ("conv_act", lambda: (cut(2, 4, 6, 6), cut(5, 4, 3, 3), cut(5), cut(2, 5, 4, 4))),
}


@pytest.mark.parametrize("case", CASES)
def test_elements_are_read_from_where_they_are(device, case):
    name, make = CASES[case]
    inputs = (value.to(device) if isinstance(value, torch.Tensor) else value for value in make())
    check_operator(getattr(ops, name), OPERATORS[name].reference, *inputs)
