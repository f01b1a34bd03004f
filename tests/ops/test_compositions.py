"""Every operator without a compiled library: outputs and gradients are those of the kernels, and of plain ATen.

A machine without a library runs the compositions by ``torch.ops``, for example in a loaded program. Here they replace
the compiled kernels, so that the public functions and the registered backward passes run on them.
"""

from contextlib import contextmanager

import pytest
import torch
from support.operator_samples import SAMPLES

from kfconvert import extension, ops

OPERATORS = sorted(
    name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("kfconvert::")
)
# A backend without kernels here, for which torch runs the registered composition of each operator.
WITHOUT_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
MOST_ELEMENTS = 5000
RANDOM = {"gelu_dropout", "bias_dropout_add"}  # plain ATen drops other elements

pytestmark = pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no compiled kernels to compare with")


@contextmanager
def compositions():
    """Context manager in which the compositions replace the compiled CPU kernels. Gives the names of those that ran."""
    ran = set()

    def composition(name):
        operator = getattr(torch.ops.kfconvert, name).default

        def call(*args, **kwargs):
            ran.add(name)
            return operator.redispatch(WITHOUT_KERNELS, *args, **kwargs)

        return call

    with torch.library._scoped_library("kfconvert", "IMPL") as library:
        for name in OPERATORS:
            library.impl(name, composition(name), "CPU", allow_override=True)
        yield ran


def assert_close(actual, expected):
    # ATen's gradients of hardswish and hardsigmoid round 1/6 to float32 even in float64.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_as_the_kernels(name):
    operator = getattr(ops, name)
    calls = [sample.made(torch.float64, "cpu") for sample in SAMPLES[name]]
    calls = [
        given for given in calls if sum(x.numel() for x in given.args if isinstance(x, torch.Tensor)) < MOST_ELEMENTS
    ]
    wanted = [(given.differentiated(operator), given.run(operator)) for given in calls]
    with compositions():
        found = [(given.differentiated(operator), given.run(operator)) for given in calls]
    assert_close(found, wanted)


@pytest.mark.parametrize("name", SAMPLES)
def test_as_plain_aten(name, monkeypatch):
    operator, given = getattr(ops, name), SAMPLES[name][0].made(torch.float64, "cpu")
    wanted = given.differentiated(operator)
    monkeypatch.setattr(extension, "EXTENSION_LOADED", False)
    assert_close(given.differentiated(operator), wanted)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, bias, state: torch.ops.kfconvert.dropout_act(x, bias, x, *state, 0.3, 2, 0.2, -1),
        lambda x, bias, state: torch.ops.kfconvert.dropout_act(x, None, None, *state, 0.3, 5, 0.2, 0),
    ],
)
def test_dropout(call):
    x, bias = (torch.linspace(-1, 2, size).double().requires_grad_() for size in (24, 6))
    for state in ((None, 5, 7), (torch.tensor([5, 7]), 0, 0)):
        wanted = torch.autograd.grad(call(x.view(4, 6), bias, state).sin().sum(), (x, bias), allow_unused=True)
        with compositions() as ran:
            found = torch.autograd.grad(call(x.view(4, 6), bias, state).sin().sum(), (x, bias), allow_unused=True)
        assert_close(found, wanted)
        assert {"dropout_act"} < ran


def test_in_place():
    def biased():
        x, bias, residual = (torch.linspace(-1, 2, size).double() for size in (24, 6, 24))
        x = x.view(4, 6)
        torch.ops.kfconvert.bias_act_(x, bias, residual.view(4, 6).sin(), 2, 0.2, -1)
        return x

    compiled = biased()
    with compositions() as ran:
        assert_close(biased(), compiled)
    assert ran == {"bias_act_"}
