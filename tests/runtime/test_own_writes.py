"""Attributes that a model's own forward writes while it runs unconverted, and that others write in the meantime."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from support import small_models
from support.state_changes import Alike, Subject
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class Writing(nn.Module):
    """Its forward writes attributes: a schedule in training, and a peak in calls with a ``limit``, which no program
    serves. ``paused`` is called there. (batch, 16) -> (batch, 16)"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.rate, self.peak, self.other = 1.0, 0.0, 1.0
        self.history: list[float] = [1.0]
        self.unread = 0
        self.paused: Callable[[], None] | None = None

    def forward(self, x: Tensor, limit: float | None = None) -> Tensor:
        if self.training:
            self.rate = self.rate * 0.5
            self.history[-1] = self.history[-1] + 1.0
        if limit is not None:
            self.peak = max(self.peak, limit)
            self.unread = x.shape
            if self.paused is not None:
                self.paused()
        y = torch.relu(self.linear(x)) * self.rate + self.peak
        return y * self.other * self.history[-1]


class Outer(nn.Module):
    """Something around another model."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(16, 4)

    def forward(self, x: Tensor, limit: float | None = None) -> Tensor:
        return nn.functional.gelu(self.head(self.inner(x, limit)))


@cache
def _made(nested: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Writing()
    model = (Outer(model) if nested else model).eval()
    return model, small_models.convert(model, example_inputs=(X,), validate_accuracy=False)


@pytest.fixture(params=[False, True], ids=["the model", "a module within it"])
def both(request):
    return Alike(*(Subject(model, lambda seed: (X,)) for model in copy.deepcopy(_made(request.param))))


def writing(model: nn.Module) -> Writing:
    return next(module for module in model.modules() if isinstance(module, Writing))


def with_limit(limit: float):
    """A call that no program serves."""
    return lambda model: torch.no_grad()(model)(X, limit)


def trained(model: nn.Module) -> None:
    model.train()
    model(X)
    model.eval()


def test_a_schedule_that_goes_on_in_training(both):
    both.call("before")
    for _ in range(2):
        both.each(trained)
        both.call("after a call in train mode")
        both.call("another call")
    assert writing(both.converted.model).rate == 0.25


def test_a_peak_that_calls_write_which_no_program_serves(both):
    both.call("before")
    for limit in (2.0, 1.0, 3.0):
        both.each(with_limit(limit))
        both.call(f"after a limit of {limit}")
        both.call("another call")


def test_what_was_written_may_be_written_back(both):
    both.call("before")
    both.each(with_limit(2.0))
    both.call("after the call")
    both.each(lambda model: setattr(writing(model), "peak", 0.0))
    hits = both.hits()
    both.call("with the first value again")
    assert both.hits() > hits


def test_attributes_that_the_graph_does_not_read_may_be_written(both):
    both.call("before")
    both.each(with_limit(0.0))  # writes ``unread``, and a peak that is what it was
    assert writing(both.converted.model).unread == X.shape
    hits = both.hits()
    both.call("after the call")
    assert both.hits() == hits + 1
