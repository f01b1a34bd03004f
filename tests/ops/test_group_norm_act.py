import pytest
import torch
from helpers import DTYPES

from kfconvert import ops
from kfconvert.kernels.reference import group_norm_act as reference


def inputs(shape, dtype, device, offset=0.0):
    x = torch.randn(shape, device=device).mul(3).add(offset).to(dtype)
    return x, *torch.randn(2, shape[1], device=device).to(dtype)


@pytest.mark.parametrize("inner", [1, 5, 64, 1000, 40000])
def test_nothing_is_left_of_equal_values(device, inner):
    values = torch.tensor([0.1709, 1.3, -7.77, 1e4, 1e-4], device=device)
    x = values[:, None, None].expand(5, 4, inner).contiguous()
    assert torch.equal(ops.group_norm_act(x, 2, eps=1e-12), torch.zeros_like(x))


def test_special_values(device):
    x, weight, bias = inputs((4, 8, 4, 4), torch.float32, device)
    x[0, 0, 1, 1], x[1, 5, 2, 2], x[2, 7, 0, 0] = float("nan"), float("inf"), -float("inf")
    for activation in ("none", "relu", "silu", "sigmoid"):
        got = ops.group_norm_act(x, 2, weight, bias, activation=activation)
        torch.testing.assert_close(got, reference(x, 2, weight, bias, activation=activation), equal_nan=True)
        assert got.isnan().sum() == 3 * 4 * 16


def around_a_half(shape, dtype, device):
    x = torch.randn(shape, device=device).mul(2).add(0.5).to(dtype)
    return x, *torch.randn(2, shape[1], device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 1, 1)])
def test_groups_of_one_value(device, shape, dtype):
    leaves = [t.requires_grad_() for t in around_a_half(shape, dtype, device)]
    y = ops.group_norm_act(leaves[0], shape[1], *leaves[1:], activation="silu")
    grad = torch.randn_like(y)
    grad_x, grad_weight, grad_bias = torch.autograd.grad(y, leaves, grad)
    assert torch.equal(grad_x, torch.zeros_like(grad_x)) and torch.equal(grad_weight, torch.zeros_like(grad_weight))
    bias = leaves[2].detach().double().expand(shape[0], -1).requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.silu(bias), bias, grad.flatten(1).double())
    torch.testing.assert_close(grad_bias, want.sum(0).to(dtype))


@pytest.mark.parametrize("shape", [(2, 8, 4, 8), (2, 8, 64, 64)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_without_weight_or_bias(device, shape, activation):
    x, weight, bias = around_a_half(shape, torch.float32, device)
    grad = torch.randn_like(x)
    for w, b in ((weight, None), (None, bias), (None, None)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b) if t is not None]

        def run(function, missing):
            given = iter(leaves)
            affine = [missing if t is None else next(given) for t in (x, w, b)]
            y = function(affine[0], 2, *affine[1:], activation=activation)
            return torch.autograd.grad(y, leaves, grad)

        # With a bias and no weight ATen's backward of torch 2.11 fails.
        want = run(reference, torch.ones_like(weight) if w is None and b is not None else None)
        torch.testing.assert_close(run(ops.group_norm_act, None), want, rtol=1e-4, atol=1e-4)


def test_nan_stays_in_its_group(device):
    x, weight, bias = around_a_half((2, 8, 4, 4), torch.float32, device)
    x[0, 0, 1, 1] = float("nan")
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = ops.group_norm_act(leaves[0], 2, *leaves[1:], activation="silu")
    grad_x, grad_weight, _ = torch.autograd.grad(y.sum(), leaves)
    assert grad_x[0, :4].isnan().all() and not grad_x[0, 4:].isnan().any() and not grad_x[1].isnan().any()
    assert grad_weight[:4].isnan().all() and not grad_weight[4:].isnan().any()
