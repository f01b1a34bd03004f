"""Numbers in the patterns of users: those in names, sizes that a trace fixes, and ints in the places of floats."""

import pytest
import torch
from support.own_conversions import convert, reasons, registered
from torch import nn

X = torch.randn(4, 8)


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


@pytest.mark.parametrize("reference", [masked, fixed_before])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
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
