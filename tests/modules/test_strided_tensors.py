"""Weights, biases and statistics may lie in memory in any way: columns of a matrix, one number for all, transposed."""

import pytest
import torch
from every_module import MODULES
from torch import nn


def column(tensor):
    return torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1)[..., 0]


def expanded(tensor):
    return tensor.flatten()[:1].reshape([1] * tensor.dim()).expand(tensor.shape)


def transposed(tensor):
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


@torch.no_grad()
@pytest.mark.parametrize("lay_out", [column, expanded, transposed])
@pytest.mark.parametrize("name", MODULES)
def test_results_are_those_of_the_composition(device, name, lay_out):
    make, shapes = MODULES[name]
    module = make().to(device).requires_grad_(False).eval()
    for inner in module.modules():
        for store in (inner._parameters, inner._buffers):
            for key, tensor in store.items():
                if tensor is not None and tensor.is_floating_point():
                    changed = lay_out(torch.rand_like(tensor) + 0.5)
                    store[key] = nn.Parameter(changed, False) if store is inner._parameters else changed
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    want = module.reference(*inputs)
    for module.strategy in module.strategies(*inputs):
        for _ in range(2):
            torch.testing.assert_close(module(*inputs), want, rtol=1e-4, atol=1e-4)
