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
    for given in (x, x[..., None].contiguous(memory_format=torch.channels_last)):
        assert torch.equal(ops.group_norm_act(given, 2, eps=1e-12), torch.zeros_like(given))


# Rows that registers of one block and of two to eight hold, in packs of each size; longer ones; packs that cut groups.
DIVIDED = [
    ((1, 32, 180, 190), 32), ((3, 6, 100, 101), 1), ((1, 8, 33, 1001), 2), ((1, 4, 1024, 1030), 1), ((2, 16, 1, 1), 4),
    ((2, 640, 40, 36), 32), ((300, 30, 9, 7), 3), ((1, 2560, 8, 8), 32), ((2, 64, 5, 6, 7), 4), ((1, 5000, 2, 3), 1),
    ((1, 64, 99, 256), 64), ((64, 64, 13, 14), 32), ((1, 1040, 4, 5), 1), ((1, 24, 210, 220), 8), ((1, 520, 40, 50), 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), DIVIDED)
def test_divided_rows(device, shape, groups, dtype):
    x, weight, bias = inputs(shape, dtype, device, 30.0)
    want = reference(x.double(), groups, weight.double(), bias.double(), activation="silu").to(dtype)
    for given in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        y, again = (ops.group_norm_act(given, groups, weight, bias, activation="silu") for _ in range(2))
        torch.testing.assert_close(y, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
        assert torch.equal(y, again) and y.stride() == given.stride()


def test_special_values_stay_in_their_group(device):
    x, weight, bias = inputs((4, 8, 4, 4), torch.float32, device)
    x[0, 0, 1, 1], x[1, 1, 2, 2], x[2, 3, 0, 0] = float("nan"), float("inf"), -float("inf")
    for activation in ("none", "relu", "silu", "sigmoid"):
        want = reference(x, 2, weight, bias, activation=activation)
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            got = ops.group_norm_act(given, 2, weight, bias, activation=activation)
            torch.testing.assert_close(got, want, equal_nan=True)
    y = ops.group_norm_act(x.requires_grad_(), 2, weight.requires_grad_(), bias, activation="silu")
    grad_x, grad_weight = torch.autograd.grad(y.sum(), (x, weight))
    for values in (want, grad_x):
        assert values[:3, :4].isnan().all() and values.isnan().sum() == 3 * 4 * 16
    assert grad_weight[:4].isnan().all() and not grad_weight[4:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 1, 1)])
def test_groups_of_one_value(device, shape, dtype):
    leaves = [t.requires_grad_() for t in inputs(shape, dtype, device)]
    y = ops.group_norm_act(leaves[0], shape[1], *leaves[1:], activation="silu")
    grad_x, grad_weight, _ = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert torch.equal(grad_x, torch.zeros_like(grad_x)) and torch.equal(grad_weight, torch.zeros_like(grad_weight))


@pytest.mark.parametrize("shape", [(2, 8, 4, 8), (2, 8, 64, 64)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2)])
def test_without_weight_or_bias(device, shape, activation, missing):
    tensors = inputs(shape, torch.float32, device)
    given = [None if i in missing else t.requires_grad_() for i, t in enumerate(tensors)]
    # With a bias and no weight ATen's backward of torch 2.11 fails.
    full = [torch.full_like(t, 2 - i) if i in missing else t for i, t in enumerate(tensors)]
    grad, grads = torch.randn(shape, device=device), []
    for function, (x, *affine) in ((reference, full), (ops.group_norm_act, given)):
        y = function(x, 2, *affine, activation=activation)
        grads.append(torch.autograd.grad(y, [t for t in given if t is not None], grad))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
