"""A deadline ends computations, and leaves everything else as it was."""

import pytest
import torch

from kfconvert.capture.deadline import Deadline


def test_a_computation_after_the_deadline_fails():
    with Deadline(60.0):
        x = torch.ones(2) + 1
    with pytest.raises(TimeoutError, match="took longer than 0.0 s"), Deadline(0.0):
        x + 1


def test_what_is_set_within_the_block_is_put_back():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(TimeoutError), Deadline(0.0):
        with torch.no_grad():
            pass
        assert torch.is_grad_enabled()
        parameter.data = torch.ones(2)
        parameter.requires_grad = False
        with torch.no_grad():
            try:
                parameter + 1
            finally:
                parameter.mul_(3)  # cleaning up
    assert torch.is_grad_enabled() and parameter.tolist() == [3.0, 3.0] and not parameter.requires_grad
