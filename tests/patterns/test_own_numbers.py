"""Numbers in the patterns of users: those in names, sizes that a trace fixes, and ints in the places of floats."""

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
