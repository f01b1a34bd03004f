"""A fused module reads what the graph reads, and nothing else of the modules that own it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from kfconvert import ModelConverter

ROWS, IMAGE = torch.randn(3, 16), torch.randn(2, 8, 7, 7)


class Reads(nn.Module):
    """``function(x, layer)``, which leaves out some of what ``layer`` holds."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return torch.relu(self.function(x, self.layer))


def without_norm(kind, **options):
    """A convolution, and a batch norm of which the forward reads the statistics alone."""
    layers = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, **options)])

    def function(x, both):
        x = both[0](x)
        weight, bias = (both[1].weight, None) if kind == "bias" else (None, both[1].bias)
        return F.batch_norm(x, both[1].running_mean, both[1].running_var, weight, bias)

    return layers, function, IMAGE


# What is not read -> (layer, function, inputs)
UNREAD = {
    "a linear layer's bias": (nn.Linear(16, 16), lambda x, m: F.linear(x, m.weight), ROWS),
    "a convolution's bias": (nn.Conv2d(8, 8, 3), lambda x, m: F.conv2d(x, m.weight), IMAGE),
    "a layer norm's bias": (nn.LayerNorm(16), lambda x, m: F.layer_norm(x, (16,), m.weight), ROWS),
    "a layer norm's weight": (nn.LayerNorm(16), lambda x, m: F.layer_norm(x, (16,), None, m.bias), ROWS),
    "an RMS norm's weight": (nn.RMSNorm(16), lambda x, m: F.rms_norm(x, (16,), None, 0.1) * 1.5, ROWS),
    "a group norm's bias": (nn.GroupNorm(2, 8), lambda x, m: F.group_norm(x, 2, m.weight), IMAGE),
    "a batch norm's bias": without_norm("bias"),
    "a batch norm's weight": without_norm("weight"),
}


@pytest.mark.parametrize("layer, function, x", UNREAD.values(), ids=UNREAD)
def test_what_the_forward_does_not_read_is_not_used(layer, function, x):
    model = Reads(layer, function).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 2)
    converter = ModelConverter(select="all")
    fused = converter.convert_model(model, example_inputs=x)
    assert converter.conversion_stats["total_replaced"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
        for each in (model, fused):
            for parameter in each.parameters():
                parameter.mul_(1.5)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


VIEWS = {
    "flat": lambda y: y.flatten(2),
    "parts": lambda y: y.chunk(2, 1),
    "some channels": lambda y: y[:, :2],
    "with its base": lambda y: (y, y.flatten(2)),
    "computed from a view": lambda y: y.flatten(2) + 1,
    "permuted": lambda y: y.permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_outputs_of_channels_last_programs_lie_in_memory_as_the_originals(name):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x):
            return VIEWS[name](F.gelu(self.conv(x)))

    model, x = Viewed().eval(), torch.randn(2, 8, 6, 6)
    fused = ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=x)
    assert fused.kfconvert_info()["layout"] == "channels_last"
    with torch.no_grad():
        expected, actual = (pytree.tree_leaves(each(x)) for each in (model, fused))
        for ours, theirs in zip(actual, expected):
            assert ours.stride() == theirs.stride()
        for outputs in (actual, expected):
            outputs[0].fill_(7.0)
        torch.testing.assert_close(actual, expected)
    assert fused.kfconvert_info()["guard"]["hits"] == 1
