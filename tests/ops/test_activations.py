import math
import os
import subprocess
import sys

import pytest
import torch

from kfconvert import extension, ops

# What a row of floats may be off by, in units of the last place of the exact result; measured, not wished for.
ULPS = {"tanh": 2.0, "sigmoid": 2.5, "silu": 2.5, "gelu_tanh": 6.0}


def all_magnitudes():
    """Float32 numbers of both signs over 60 binary orders of magnitude, densest where the functions bend."""
    exponents = torch.linspace(-40, 7, 20_001, dtype=torch.float64)
    x = torch.cat([torch.exp2(exponents), torch.linspace(0, 12, 50_001, dtype=torch.float64)])
    return torch.cat([x, -x]).float()


@pytest.mark.parametrize("name", ULPS)
def test_units_in_the_last_place(device, name):
    x = all_magnitudes().to(device)
    got = ops.bias_act(x, activation=name).double()
    exact = ops.apply_activation(x.double(), name)
    if name == "gelu_tanh":  # the composition cancels even in float64
        w = 2 * math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3)
        exact = x.double() * torch.sigmoid(w)
    normal = exact.abs() > 1e-30
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs()[normal])) - 23)
    # In the far tail of the exponential the rounding of its argument alone is worth many units.
    near = x[normal] > -4 if name in ("silu", "sigmoid", "gelu_tanh") else torch.ones_like(ulp, dtype=torch.bool)
    assert ((got[normal] - exact[normal]).abs() / ulp)[near].max() <= ULPS[name]


def test_gelu_absolute_error(device):
    x = all_magnitudes().to(device)
    got = ops.bias_act(x, activation="gelu").double()
    exact = ops.apply_activation(x.double(), "gelu")
    assert ((got - exact).abs() / x.double().abs().clamp_min(1e-30)).max() <= 1.8e-7


def test_codes_are_those_of_the_kernels():
    assert [a.code for a in ops.ACTIVATIONS.values()] == list(range(len(ops.ACTIVATIONS)))
    with pytest.raises(ValueError, match="unknown activation 'x'; known: none, relu, gelu"):
        ops.apply_activation(torch.ones(1), "x")


@pytest.mark.parametrize("capability", ["generic", "avx2"])
def test_every_instruction_set(capability):
    """The tests of two operators again, in a process that is held to a narrower instruction set."""
    if extension.cpu_capability() in (None, capability, "generic"):
        return  # this machine has nothing wider, so that the other tests have run on this one
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k",
               "cpu and compiled and (accurate or lengths or layouts or special or values or units) or cpu and gelu_abs",
               *(os.path.join(folder, f"test_{name}.py") for name in ("bias_act", "layer_norm_act", "activations"))]
    environment = {**os.environ, "KFCONVERT_CPU_CAPABILITY": capability}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
