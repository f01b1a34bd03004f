"""Sizes of 1, which the tracer takes for fixed, are admitted where the program then computes what the model does."""

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

SIZES = [(1, 5), (3, 1), (1, 1), (2, 4)]


class Tokens(nn.Module):
    """``flips``: of which (batch size, length) the outputs have the other sign."""

    def __init__(self, flips=lambda batch, length: False):
        super().__init__()
        self.embedding, self.linear, self.flips = nn.Embedding(20, 8), nn.Linear(8, 8), flips

    def forward(self, input_ids):
        y = torch.relu(self.linear(self.embedding(input_ids)))
        return -y if self.flips(*input_ids.shape) else y


def converted(*args):
    model = Tokens(*args).eval()
    return model, ModelConverter(select="all").convert_model(model, example_inputs=torch.randint(20, (2, 6)))


def assert_same(model, fused, size):
    ids = torch.randint(20, size)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids), model(ids))
    return fused.kfconvert_info()["guard"]["hits"]


def test_sizes_of_one_are_served():
    model, fused = converted()
    assert [assert_same(model, fused, size) for size in SIZES] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize(
    "flips",
    [
        lambda batch, length: batch == 1,
        lambda batch, length: length == 1,
        lambda batch, length: batch * length == 1,
        lambda batch, length: batch + length == 2,
    ],
)
def test_a_size_of_one_that_changes_the_outputs_runs_the_original(flips):
    model, fused = converted(flips)
    for size in SIZES:
        hits = assert_same(model, fused, size)
    assert hits  # the last of them, at least
