"""Which outputs of generated kernels are like those of the program."""

import pytest
import torch

from kfconvert.conversion.generated_kernels import _is_like

X = torch.randn(2, 3, 4, 5)
PARTS = torch.randn(2, 4, 9).split(3, dim=-1)


@pytest.mark.parametrize(
    ("output", "expected", "like"),
    [
        (X.clone(), X, True),
        (X.to(memory_format=torch.channels_last), X, False),
        (X[:1].half(), X[:1], False),
        (PARTS[1].contiguous(), PARTS[1], True),
        (PARTS[1].transpose(0, 1).contiguous(), PARTS[1].transpose(0, 1), False),
        (7, 7.0, False),
        (None, X, False),
    ],
)
def test_outputs(output, expected, like):
    assert _is_like((output,), (expected,)) is like
    assert not _is_like((output,), (expected, expected))
