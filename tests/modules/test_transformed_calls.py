"""The modules under torch.func and in forward mode, of which packed and folded weights know nothing."""

import pytest
import torch
from torch import nn

from kfconvert import modules

MODULES = {
    "linear": (lambda: modules.FusedLinear(8, 6, activation="silu"), [(20, 8)]),
    "linear_scale": (
        lambda: modules.FusedLinearScale.from_tensors(torch.randn(6, 8), torch.randn(6), torch.randn(6)),
        [(20, 8)],
    ),
    "merged": (lambda: modules.FusedMergedLinear(nn.Linear(8, 6), nn.Linear(8, 4)), [(20, 8)]),
    "gated": (lambda: modules.FusedGatedLinear(nn.Linear(8, 6), nn.Linear(8, 6)), [(20, 8)]),
    "conv": (
        lambda: modules.FusedConvBN(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), "relu").eval(),
        [(2, 4, 5, 5), (2, 6, 3, 3)],
    ),
    "batch_norm": (lambda: modules.FusedBatchNormAct(nn.BatchNorm2d(4), "relu").eval(), [(2, 4, 5, 5)]),
    "group_norm": (lambda: modules.FusedGroupNorm(nn.GroupNorm(2, 4), "silu"), [(2, 4, 5, 5)]),
    "layer_norm": (lambda: modules.FusedAddLayerNorm(8, activation="gelu", return_sum=True), [(5, 8), (5, 8)]),
    "rms_norm": (lambda: modules.FusedRMSNorm(8), [(5, 8)]),
    "rotary": (modules.FusedRotary, [(5, 8), (5, 8), (5, 8)]),
    "squeeze_excite": (
        lambda: modules.FusedSqueezeExcite(nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)),
        [(2, 4, 5, 5)],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_derivatives_are_those_of_the_composition(device, name):
    make, shapes = MODULES[name]
    module = make().to(device).requires_grad_(False).eval()
    inputs = tuple(torch.randn(shape, device=device) for shape in shapes)
    places = tuple(range(len(inputs)))

    def total(function):
        return lambda *t: sum(y.square().sum() for y in torch.utils._pytree.tree_leaves(function(*t)))

    for transform, given in (
        (lambda f: lambda *t: torch.func.jvp(f, t, inputs), inputs),
        (lambda f: torch.func.grad(total(f), places), inputs),
        (lambda f: torch.func.vmap(torch.func.grad(total(f), places)), tuple(torch.stack((t, -t)) for t in inputs)),
    ):
        want = transform(module.reference)(*given)
        module(*inputs)  # what is packed or folded now must not be used
        torch.testing.assert_close(transform(module)(*given), want, rtol=1e-4, atol=1e-4)
