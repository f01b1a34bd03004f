import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.selection import exhaustive

from kfconvert import extension, ops

# What a row of floats may be off by, in units of the last place of the exact result; measured, not wished
# for.
ULPS = {"tanh": 2.0, "sigmoid": 2.5, "silu": 2.5, "gelu_tanh": 6.0, "quick_gelu": 3.0}


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
    gated = name in ("silu", "sigmoid", "gelu_tanh", "quick_gelu")
    near = x[normal] > -1 if gated else torch.ones_like(ulp, dtype=torch.bool)
    assert ((got[normal] - exact[normal]).abs() / ulp)[near].max() <= ULPS[name]


def test_gelu_absolute_error(device):
    x = all_magnitudes().to(device)
    got = ops.bias_act(x, activation="gelu").double()
    exact = ops.apply_activation(x.double(), "gelu")
    assert ((got - exact).abs() / x.double().abs().clamp_min(1e-30)).max() <= 1.8e-7


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "quick_gelu", "mish"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_huge_numbers(device, dtype, name):
    """0 far to the left and 1 far to the right, without what overflows on the way there."""
    x = torch.tensor([1e2, 1e4, 1e12, 1e14, 1e19, 1e34, 1e37, 1e38], dtype=dtype, device=device)
    for sign in (1, -1):
        leaf = (sign * x).requires_grad_()
        y = ops.mish_scale(leaf, torch.ones_like(x)) if name == "mish" else ops.bias_act(leaf, activation=name)
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        want = torch.full_like(x, sign == 1)
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-34)
        torch.testing.assert_close(y.detach(), leaf.detach() * want, rtol=0, atol=1e-34)


def test_infinite_and_large_values(device):
    x = torch.tensor([float("inf"), -float("inf"), 1e37, -1e37, 88.0, -88.0]).repeat(8)
    for name in ops.ACTIVATIONS:
        got, exact = ops.bias_act(x.to(device), activation=name), ops.apply_activation(x.double(), name)
        near = torch.isclose(got.cpu().double(), exact, rtol=2e-6, atol=1e-30, equal_nan=True)
        assert near.all(), (name, x[~near])


def test_a_nan_stays_one(device):
    """Whatever its sign and payload."""
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32, device=device)
    x = bits.view(torch.float32).repeat(8)
    for name in ops.ACTIVATIONS:
        assert ops.bias_act(x, activation=name).isnan().all(), name
    for name in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(ops.bias_act(leaf, activation=name).sum(), leaf)
        assert grad.isnan().all(), name


def test_codes_are_those_of_the_kernels():
    assert [a.code for a in ops.ACTIVATIONS.values()] == list(range(len(ops.ACTIVATIONS)))
    with pytest.raises(ValueError, match="unknown activation 'x'; known: none, relu, gelu"):
        ops.apply_activation(torch.ones(1), "x")


@pytest.mark.parametrize("capability", ["generic", *exhaustive("avx2")])
def test_every_instruction_set(capability):
    """The kernels of a narrower instruction set, in a process held to it, agree with ATen in every dtype."""
    code = (
        """
import torch
from kfconvert import extension, ops
assert extension.cpu_capability() in (None, "generic", %r)
tolerances = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
for dtype, tolerance in tolerances.items():
    x, r, w, b = (torch.randn(n).to(dtype) for n in (37 * 133, 37 * 133, 133, 133))
    x, r = x.view(37, 133) * 4, r.view(37, 133)
    wide = [t.double() for t in (x, r, w, b)]
    for name in ops.ACTIVATIONS:
        got = [ops.bias_act(x, b, r, name), *ops.layer_norm_act(x, 133, w, b, 1e-5, name, r, True)]
        leaf = x.clone().requires_grad_()
        got += torch.autograd.grad(ops.layer_norm_act(leaf, 133, w, b, activation=name).sum(), leaf)
        leaf = x.clone().requires_grad_()
        got += [ops.act_mul(x, r, name), *torch.autograd.grad(ops.act_mul(leaf, r, name).sum(), leaf)]
        x, r, w, b = wide
        want = [ops.apply_activation(x + b + r, name), ops.apply_activation(
            torch.nn.functional.layer_norm(x + r, (133,), w, b), name), x + r]
        leaf = x.clone().requires_grad_()
        y = ops.apply_activation(torch.nn.functional.layer_norm(leaf, (133,), w, b), name)
        want += torch.autograd.grad(y.sum(), leaf)
        leaf = x.clone().requires_grad_()
        want += [ops.apply_activation(x, name) * r]
        want += torch.autograd.grad((ops.apply_activation(leaf, name) * r).sum(), leaf)
        x, r, w, b = (t.to(dtype) for t in wide)
        for mine, truth in zip(got, want, strict=True):
            error = ((mine.double() - truth).abs() / (1 + truth.abs())).max().item()
            # ATen's gradient of hardsigmoid rounds 1/6 to float32 even in float64.
            allowed = max(tolerance, 1e-7) if name == "hardsigmoid" else tolerance
            assert error < allowed, (name, dtype, error)
for dtype, tolerance in tolerances.items():
    for cols in (1, 3, 7, 8, 15, 16, 17, 63, 64, 65, 133, 512, 513, 1500):  # whole vectors and what is left of them
        x, residual = torch.randn(29, cols).to(dtype), torch.randn(1, cols).to(dtype)
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        grad = torch.randn(29, cols).to(dtype)
        y, z = ops.softmax(leaf), torch.softmax(exact, -1)
        got, want = [y, *torch.autograd.grad(y, leaf, grad)], [z, *torch.autograd.grad(z, exact, grad.double())]
        got += [ops.layer_norm_act(x, cols, residual=residual), ops.rms_norm_act(x, cols)]
        want += [torch.nn.functional.layer_norm(exact + residual.double(), (cols,))]
        want += [torch.nn.functional.rms_norm(exact, (cols,), None, 1e-6)]
        got += [ops.reduce_sum_squared(x, -1), ops.reduce_mean_abs(x, -1), ops.softmax(x, -1, 0.5)]
        want += [exact.square().sum(-1), exact.abs().mean(-1), torch.softmax(exact * 0.5, -1)]
        for place, (mine, truth) in enumerate(zip(got, want, strict=True)):
            error = ((mine.double() - truth).abs() / (1 + truth.abs())).max().item()
            assert error < tolerance, (place, cols, dtype, error)
special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 1e-7, -1e-40] * 9)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for name in ("none", "relu", "tanh", "sigmoid"):
        x = special.to(dtype)
        got, want = ops.bias_act(x, activation=name), ops.apply_activation(x, name)
        torch.testing.assert_close(got, want, equal_nan=True)
"""
        % capability
    )
    environment = {**os.environ, "KFCONVERT_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    root = Path(extension.__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
