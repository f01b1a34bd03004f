"""Numbers in the patterns of users: those in names, sizes that a trace fixes, and ints in the places of floats."""

import pytest
import torch
from support.own_conversions import convert, reasons, registered
from support.selection import each_once
from torch import nn

X = torch.randn(4, 8)
TIMES = torch.arange(4)[:, None] + 2


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y=None):
        return self.function(x) if y is None else self.function(x, y)


def test_each_of_many_results_is_in_its_place():
    def reference(x):
        return tuple(torch.sigmoid(x) * (i + 1.0) for i in range(12))

    with registered(reference, reference, (X,), name="many", numerics="exact"):
        converted, stats = convert(model := Function(reference), X)
    assert stats["many_replaced"] == 1, reasons(stats, "many")
    with torch.no_grad():
        torch.testing.assert_close(converted(X), model(X), rtol=0, atol=0)


def masked(x, mask):
    return torch.cos(x * mask)


def fixed_before(x, mask):
    """It reads a size while that is free, which the product fixes."""
    pairs = mask.reshape(mask.shape[0], mask.shape[1] // 2, 2) * mask.shape[1]
    return torch.cos(x * mask).reshape(x.shape[0], 4, 2) * pairs * torch.sym_sqrt(mask.shape[1])


@each_once(reference=[masked, fixed_before], dtype=[torch.float32, torch.int64, torch.bool])
def test_a_size_that_the_trace_has_fixed_is_fixed(reference, dtype):
    seen = []

    def when(match):
        seen.append(match["mask"].shape)
        return match["mask"].shape[1] % 8 == 0

    mask = (X > 0).to(dtype)
    with registered(reference, reference, (X, mask), name="masked", when=when):
        converted, stats = convert(model := Function(reference), X, mask)
    assert stats["masked_replaced"] == 1, reasons(stats, "masked")
    assert set(seen) == {(None, 8)}
    with torch.no_grad():
        torch.testing.assert_close(converted(X[:3], mask[:3]), model(X[:3], mask[:3]))
    assert converted.kfconvert_info()["guard"] == {"hits": 1, "misses": {}}


def sine(x, number):
    return torch.sin(x * number)


def clock(x, times, period):
    return torch.sin(x + (times * period) % 10)


def later(x, times, start):
    return torch.where(times > start, x.sin(), x) * 1.5


@pytest.mark.parametrize(
    ("reference", "example", "function"),
    [
        (sine, (X, 1.5), lambda x, times: torch.sin(x * 2)),
        (sine, (X, 3), lambda x, times: torch.sin(x * 3.0)),
        (clock, (X, TIMES, 1.5), lambda x, times: torch.sin(x + (times * 3.0) % 10)),
        (clock, (X, TIMES, 3), lambda x, times: torch.sin(x + (times * 3) % 10)),
        (
            lambda x: torch.cat([x.sin(), torch.full((1, 8), 0.0, dtype=x.dtype)]),
            (X,),
            lambda x, times: torch.cat([x.sin(), torch.full((1, 8), 0, dtype=x.dtype)]),
        ),
    ],
)
def test_an_int_may_stand_for_a_float_where_that_changes_no_dtype(reference, example, function):
    with registered(reference, reference, example, name="own"):
        converted, stats = convert(model := Function(function), X, TIMES)
    assert stats["own_replaced"] == 1, reasons(stats, "own")
    for times in (TIMES, TIMES + 1_700_000_000):
        with torch.no_grad():
            torch.testing.assert_close(converted(X, times), model(X, times))


@pytest.mark.parametrize(
    ("reference", "example", "function"),
    [
        (clock, (X, TIMES, 1.5), lambda x, times: torch.sin(x + (times * 3) % 10)),
        (clock, (X, TIMES, 3), lambda x, times: torch.sin(x + (times * 3.0) % 10)),
        (lambda x, times: clock(x, times, 3.0), (X, TIMES), lambda x, times: torch.sin(x + (times * 3) % 10)),
        (lambda x, times: clock(x, times, 3), (X, TIMES), lambda x, times: torch.sin(x + (times * 3.0) % 10)),
        (later, (X, TIMES, 2.5), lambda x, times: torch.where(times > 16777216, x.sin(), x) * 1.5),
        (
            lambda x, times: torch.sin(x + torch.clamp(times, 0.0, 3.0)),
            (X, TIMES),
            lambda x, times: torch.sin(x + torch.clamp(times, 0, 3)),
        ),
        (
            lambda x, times: torch.sin(x + (times > 3) * 1),
            (X, TIMES),
            lambda x, times: torch.sin(x + (times > 3) * True),
        ),
    ],
)
def test_an_int_does_not_stand_for_a_float_where_dtypes_change(reference, example, function):
    with registered(reference, reference, example, name="own"):
        _, stats = convert(Function(function), X, TIMES)
    changed = "an int in place of a float, or a float in place of an int, changes the computation dtype"
    assert reasons(stats, "own") == [changed]


def test_an_int_that_is_no_float_stands_for_none():
    with registered(sine, sine, (X, 1.5), name="own"):
        _, stats = convert(Function(lambda x: torch.sin(x * (2**53 + 1))), X)
    assert reasons(stats, "own") == [f"the argument number is {2**53 + 1}, which is not exact as a float"]
