"""softmax of scaled and masked scores against plain ATen."""

import pytest
import torch
from helpers import DTYPES, check_operator

from kfconvert import extension, ops
from kfconvert.kernels import reference


def scores(shape, dtype, device):
    return torch.randn(shape, device=device).mul(3).to(dtype)


@pytest.mark.parametrize("columns", [8, 500, 1024, 9000])
def test_special_values(device, columns):
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(6, columns, device=device)
    x[0, 1], x[1, 3], x[2, :], x[3, 2:] = nan, inf, -inf, -inf
    x[4, 0], x[5, :4] = 80000.0, torch.tensor([-inf, nan, 1.0, 0.0], device=device)
    torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rows_without_an_element(device, dtype):
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]], device=device)
    grads = []
    for package in (ops, reference):
        x = torch.arange(18, device=device).reshape(2, 3, 3).sin().to(dtype).requires_grad_()
        y = package.softmax(x, scale=0.5, mask=mask).masked_fill(~mask, 0)
        grads += torch.autograd.grad(y, x, torch.arange(18, device=device).reshape(2, 3, 3).to(dtype))
    assert (grads[0][:, 1] == 0).all() and (grads[0][:, ~mask] == 0).all()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("columns", [8, 37, 5000, 20_000])
def test_special_gradients_with_boolean_masks(device, columns):
    """Where the mask is False the gradient is 0, but a gradient there that is not finite is one of the row's."""
    inf, nan = float("inf"), float("nan")
    mask = torch.rand(6, columns, device=device) > 0.4
    mask[:, 1], mask[:, 2], mask[5] = False, True, False
    grad = torch.randn(6, columns, device=device)
    grad[0, 1], grad[1, 1], grad[2, 2], grad[3, 2] = inf, nan, nan, inf
    grads = []
    for package in (ops, reference):
        x = torch.linspace(-3, 3, 6 * columns, device=device).reshape(6, columns)
        x[4, 2] = nan
        x.requires_grad_()
        grads += torch.autograd.grad(package.softmax(x, scale=0.5, mask=mask), x, grad)
    assert (grads[0][~mask] == 0).all() and grads[0][:5, 2].isnan().all()
    torch.testing.assert_close(*grads, equal_nan=True)


def test_other_names(device, monkeypatch):
    x = scores((4, 8), torch.float32, device)
    assert torch.equal(ops.SoftMaxOp.apply(x, -1), ops.softmax(x))
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", True)
    assert isinstance(ops.get_cuda_softmax(), ops.SoftMaxOp)
    assert torch.equal(ops.get_cuda_softmax()(x, -1, 0.5), ops.softmax(x, -1, 0.5))
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", False)
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        ops.get_cuda_softmax()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 33), (5,), (0, 4), (70, 3000)])
def test_halves(device, dtype, shape):
    x, grad = (torch.randn(shape, device=device).to(dtype) for _ in "xg")
    op = ops.SoftMaxOp()
    y = check_operator(op.forward, lambda x: torch.softmax(x, -1), x)
    check_operator(op.backward, lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, y.dtype), grad, y)


def test_halves_of_a_module(device):
    class Doubled:
        forward = staticmethod(lambda x: 2 * x)
        backward = staticmethod(lambda grad, output: grad + output)

    x, op = scores((4, 8), torch.float32, device), ops.SoftMaxOp(Doubled)
    assert torch.equal(op.forward(x), 2 * x) and torch.equal(op.backward(x, x), 2 * x)
    with pytest.raises(TypeError, match="^kfconvert::softmax: scale must be a number, got dtype$"):
        op.apply(x, -1, torch.float32)
    with pytest.raises(TypeError, match="^kfconvert::softmax: module must have forward and backward, got int$"):
        ops.SoftMaxOp(3)
