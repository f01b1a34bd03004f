"""Norms of rows: special values, sums that are rounded, outputs of which one alone is used."""

import pytest
import torch
import torch.nn.functional as F
from helpers import check_operator

from kfconvert import ops
from kfconvert.kernels.reference import layer_norm_act as reference
from kfconvert.ops.fused.rms_norm_act import reference as rms_reference


def inputs(shape, normalized, dtype, device, affine_dtype=None):
    x, residual = torch.randn(shape) * 2 + 0.5, torch.randn(shape)
    weight, bias = torch.rand(normalized) + 0.5, torch.randn(normalized)
    return (
        *(t.to(device, dtype) for t in (x, residual)),
        *(t.to(device, affine_dtype or dtype) for t in (weight, bias)),
    )


def test_large_mean_and_constant_rows(device):
    x = torch.randn(8, 256, device=device) + 1000
    check_operator(ops.layer_norm_act, reference, x, (256,))
    assert torch.equal(
        ops.layer_norm_act(torch.full((2, 64), 3.0, device=device), 64), torch.zeros(2, 64, device=device)
    )


@pytest.mark.parametrize("cols", [1, 3, 6, 7, 64, 100, 768, 1001, 4096, 5000, 20000])
def test_nothing_is_left_of_equal_values(device, cols):
    values = torch.tensor([0.1709, 1.3, -7.77, 1e4, 1e-4], device=device)
    x = values[:, None].expand(5, cols).contiguous()
    assert torch.equal(ops.layer_norm_act(x, (cols,), eps=1e-12), torch.zeros_like(x))


def test_nan_and_infinity(device):
    x = torch.randn(4, 32, device=device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    for activation in ("none", "relu", "gelu", "silu"):
        got, want = (ops.layer_norm_act(x, 32, activation=activation), reference(x, (32,), activation=activation))
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("cols", [64, 100, 768, 9000, 40000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_sums_that_vary_less_than_their_rounding(device, cols, dtype):
    """The statistics have to be those of the rounded sum: it is all that the backward has."""
    _, _, weight, bias = inputs((5, cols), (cols,), dtype, device)
    x, residual = (torch.full((5, cols), value, dtype=dtype, device=device) for value in (100.0, 0.3))
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    grad = torch.randn(5, cols, device=device).to(dtype)
    y = ops.layer_norm_act(x, cols, weight, bias, residual=residual)
    of_x, of_residual, of_weight, of_bias = torch.autograd.grad(y, leaves, grad)

    exact = [t.detach().double().requires_grad_() for t in (x + residual, weight, bias)]
    want = torch.autograd.grad(F.layer_norm(exact[0], (cols,), *exact[1:]), exact, grad.double())
    assert torch.equal(of_x, of_residual)
    for ours, expected in zip((of_x, of_weight, of_bias), want, strict=True):
        largest = max(1, expected.abs().max().item())
        torch.testing.assert_close(ours.double(), expected, rtol=2**-7, atol=2**-7 * largest)


def test_gradients_of_empty_inputs(device):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((0, 8), (8,), torch.float32, device))
    y, s = ops.layer_norm_act(x, 8, weight, bias, residual=residual, return_sum=True)
    (y.sum() + s.sum()).backward()
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_gradient_through_one_output_only(device):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((3, 8), (8,), torch.float64, device))
    y, s = ops.layer_norm_act(x, 8, weight, bias, residual=residual, return_sum=True)
    assert torch.equal(torch.autograd.grad(s.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    want = torch.autograd.grad(reference(x, (8,), weight, bias, residual=residual).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], want)


@pytest.mark.parametrize("norm", [ops.layer_norm_act, ops.rms_norm_act])
@pytest.mark.parametrize("cols", [16_384, 65_536, 3_000_000])
def test_long_rows(device, norm, cols):
    """Roundings that are all alike, as those of squares of one magnitude, do not add up."""
    x = torch.where(torch.rand(2, cols, device=device) < 0.5, 1.1, -1.1)
    grad = torch.randn(2, cols, device=device)
    results = []
    for wide in (x, x.double()):
        leaf = wide.requires_grad_()
        y = norm(leaf, cols)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad.to(y.dtype))))
    for got, exact in zip(*results, strict=True):
        assert (got - exact).abs().max() <= 3e-7 * exact.abs().max()


def rms_inputs(shape, normalized, dtype, device, weight_dtype=None):
    x, residual, weight = torch.randn(shape) * 2 + 0.5, torch.randn(shape), torch.rand(normalized) + 0.5
    x, residual = (t.to(device, dtype) for t in (x, residual))
    return x, residual, weight.to(device, weight_dtype or dtype)


def test_the_reference_is_aten(device):
    x, _, weight = rms_inputs((4, 5, 6), (5, 6), torch.float64, device)
    for w in (weight, None):
        torch.testing.assert_close(rms_reference(x, (5, 6), w, 1e-3), torch.nn.functional.rms_norm(x, (5, 6), w, 1e-3))
    torch.testing.assert_close(rms_reference(x, (5, 6), weight, offset=1.0), rms_reference(x, (5, 6), weight + 1))


def test_a_mean_is_not_subtracted(device):
    x = torch.randn(8, 256, device=device) + 1000
    check_operator(ops.rms_norm_act, rms_reference, x, (256,))
    constant = torch.full((2, 64), 3.0, device=device)
    torch.testing.assert_close(ops.rms_norm_act(constant, 64), torch.ones_like(constant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_infinity_of_rms_norms(device, dtype):
    x = torch.randn(5, 32, device=device).to(dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), -float("inf"), 0
    for activation in ("none", "relu", "gelu", "silu"):
        for eps in (1e-6, 0.0):  # with 0, a row of zeros is one of NaN
            got, want = (f(x, 32, eps=eps, activation=activation) for f in (ops.rms_norm_act, rms_reference))
            assert torch.equal(got.isnan(), want.isnan())
