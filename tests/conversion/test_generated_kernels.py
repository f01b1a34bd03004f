"""Which generated kernels serve a program."""

import pytest
import torch

from kfconvert.conversion.generated_kernels import _faster_in, _is_like

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


def test_earlier_times_choose_the_form_to_compile():
    assert _faster_in(None, ("all", "rest")) == ("all", "rest")
    assert _faster_in({"program": 100.0, "all": 90.0, "rest": 80.0}) == ["rest"]
    assert _faster_in({"program": 100.0, "all": 99.0}) == _faster_in({"program": 100.0, "rest": 120.0}) == []
