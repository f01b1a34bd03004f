"""Operators are counted once each, whatever they call themselves."""

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from kfconvert import ops
from kfconvert.profiling import count_operators


def test_operators_count_without_those_that_they_call():
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    assert count_operators(lambda: x) == 0
    assert count_operators(lambda: torch.exp(x + x)) == 2
    assert count_operators(lambda: F.linear(x, weight)) == 1
    with torch.no_grad():
        assert count_operators(lambda: ops.add_mul_exp(x, x)) == 1


def test_it_is_not_known_where_the_thread_is_being_profiled():
    with torch.autograd.profiler_legacy.profile():
        assert count_operators(lambda: None) is None


def test_another_profiler_does_not_end_for_it():
    with profile(activities=[ProfilerActivity.CPU]) as session:
        count_operators(lambda: torch.ones(2) + 1)
        torch.ones(2).exp_()
    assert "aten::exp_" in {event.name for event in session.events()}
