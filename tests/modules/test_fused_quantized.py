"""FusedQuantizedLinear, and several of them as one product."""

import pytest
import torch
from torch import nn

from kfconvert.modules import FusedGatedQuantizedLinear, FusedMergedQuantizedLinear, FusedQuantizedLinear


def layer(out=8, columns=16):
    numbers = torch.randint(-128, 128, (out, columns), dtype=torch.int8)
    return FusedQuantizedLinear.from_tensors(numbers, nn.Parameter(torch.rand(out, 1).bfloat16() / 100))


@torch.no_grad()
@pytest.mark.parametrize("columns", [8, 16, 24, 40, 64])
def test_the_library_gets_no_rows_past_whose_ends_it_reads(columns):
    torch.manual_seed(0)
    module, x = layer(6, columns), torch.randn(3, columns).bfloat16()
    assert ("int8pack" in module.strategies(x)) == (columns % 16 == 0)
    torch.testing.assert_close(module(x), module.reference(x))


def shifted(tensor):
    """A copy that begins 8 bytes after an aligned address, as in a file that is mapped to memory."""
    memory = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    return memory[8 // tensor.element_size() :][: tensor.numel()].view(tensor.shape).copy_(tensor)


CHANGES = {
    "unaligned weight": lambda m: setattr(m, "weight", shifted(m.weight)),
    "other layout": lambda m: setattr(m, "weight", m.weight.t().contiguous().t()),
    "expanded scale": lambda m: setattr(m, "scale", nn.Parameter(m.scale[:1].expand_as(m.scale))),
    "scale with gaps": lambda m: setattr(m, "scale", nn.Parameter(torch.cat([m.scale, -m.scale], 1)[:, :1])),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_meets_other_tensors(name):
    torch.manual_seed(0)
    module, x = layer(8, 64), torch.randn(3, 64).bfloat16()
    module.strategy = "int8pack"
    plan = module.plan(x)
    CHANGES[name](module)
    for given in (x, shifted(x)):
        torch.testing.assert_close(plan(given), module.reference(given), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_more_weights_than_one_launch_takes(device):
    torch.manual_seed(0)
    module = FusedMergedQuantizedLinear(*(layer(out) for out in (8, 4, 2, 8, 6))).to(device)
    x = torch.randn(2, 16).to(device).bfloat16()
    for module.strategy in module.strategies(x):
        torch.testing.assert_close(module(x), module.reference(x))
        plan = module.plan(x)
        for rows in (1, 20):  # a plan meets any number of rows
            given = torch.randn(rows, 16).to(device).bfloat16()
            torch.testing.assert_close(plan(given), module.reference(given))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FusedMergedQuantizedLinear(layer()), "two linear layers or more, got 1"),
        (lambda: FusedMergedQuantizedLinear(layer(), layer(8, 32)), "differ in input size"),
        (lambda: FusedGatedQuantizedLinear(layer(), layer(4)), "gate and up have 8 and 4 features"),
        (lambda: FusedGatedQuantizedLinear(layer(), layer(), "mish"), "unknown activation 'mish'"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
