"""The modules under torch.func and in forward mode, of which packed and folded weights know nothing."""

import pytest
import torch
from every_module import MODULES


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
