"""Free sizes of which a forward makes text, or which it looks up in a dict: no branch of the tracer tells of that."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter


def in_dict(x):
    try:
        return {4: 2.0}[x.shape[0]]
    except (KeyError, TypeError):
        return 1.0


WORDS = {
    "str": lambda x: 2.0 if str(x.shape[0]) == "4" else 1.0,
    "f-string": lambda x: 2.0 if f"{x.shape[0]}" == "4" else 1.0,
    "format": lambda x: 2.0 if "{:>2}".format(str(x.size(0))) == " 4" else 1.0,  # noqa: UP032 - the other way to say it
    "%": lambda x: 2.0 if "%s" % x.shape[0] == "4" else 1.0,
    "repr": lambda x: 2.0 if repr(x.size(0)) == "4" else 1.0,
    "text of a shape": lambda x: 2.0 if str(tuple(x.shape)) == "(4, 8)" else 1.0,
    "dict": in_dict,
    "message": lambda x: 2.0 if f"{x.shape[0]} rows" else 1.0,
}


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name

    def forward(self, x):
        return torch.relu(self.linear(x)) * WORDS[self.name](x)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.filterwarnings("ignore:kfconvert")
@torch.no_grad()
def test_words_of_a_size(name):
    model = Net(name).eval()
    fused = ModelConverter(select="all").convert_model(copy.deepcopy(model), input_shape=(4, 8))
    for rows in (4, 5, 3, 12):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(fused(x), model(x))
    # Text that decides nothing fixes no size.
    assert fused.kfconvert_info()["guard"]["hits"] == (4 if name == "message" else 1)
