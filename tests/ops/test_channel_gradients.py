"""The backward passes that add up by channel, against ATen's sums: layouts, sizes, which gradients are asked for."""

import pytest
import torch
from helpers import DTYPES, check_gradients

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.fused.bias_act import reference as bias_act

OPERATORS = torch.ops.kfconvert
MANY = [
    ((7, 8), -1), ((3, 70_001), 1), ((700, 24), 1), ((2, 8, 4, 6), 1), ((9, 11, 7, 3), 1), ((8,), 0), ((2, 0, 4), 1),
]  # fmt: skip
# Of the gradients of a few channels it is chance whose error is the larger one.
FEW = [((5000, 3), -1), ((9, 5, 7, 3), 1), ((40, 2, 16, 16), 1), ((4, 6, 9), 0), ((300, 1), 1), ((0, 4), 1)]
CASES = [(shape, dim, dtype) for shape, dim in MANY for dtype in DTYPES] + [(*few, torch.float64) for few in FEW]


def tensors(shape, dim, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    return x, torch.randn(shape[dim], device=device).to(dtype), torch.rand(shape[dim], device=device).to(dtype)


@pytest.mark.parametrize(("shape", "dim", "dtype"), CASES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_bias(device, shape, dim, activation, dtype):
    x, bias, _ = tensors(shape, dim, dtype, device)
    weights = [torch.randn(shape, device=device).to(dtype)]

    def of(function):
        return lambda x, bias: function(x, bias, activation=activation, dim=dim)

    check_gradients(of(ops.bias_act), of(bias_act), (x, bias), weights)


@pytest.mark.parametrize(("shape", "dim", "dtype"), CASES)
def test_prelu(device, shape, dim, dtype):
    weights = [torch.randn(shape, device=device).to(dtype)]

    def of(function):
        return lambda x, bias, weight: function(x, weight, bias, dim=dim)

    inputs = tensors(shape, dim, dtype, device)
    check_gradients(of(ops.prelu_bias), of(reference.prelu_bias), inputs, weights)


@pytest.mark.parametrize(("shape", "dim", "dtype"), CASES)
def test_dropout(device, compiled, shape, dim, dtype):
    """The gradient of the bias is the sum of that of x, of which the dropped elements are zeros."""
    x, bias, _ = tensors(shape, dim, dtype, device)
    leaves = [t.requires_grad_() for t in (x, bias)]
    y = ops.bias_dropout_add(*leaves, torch.zeros_like(x), 0.4, dim=dim)
    of_x, of_bias = torch.autograd.grad(y, leaves, torch.randn_like(x))
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    want = of_x.double().sum(others) if others else of_x.double()
    rounding = torch.finfo(dtype).eps * max(1, x.numel() ** 0.5)
    torch.testing.assert_close(of_bias.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=8 * rounding)
    if compiled and device == "cpu" and x.numel() > 100:
        assert 0.2 < (of_x == 0).double().mean() < 0.6


@pytest.mark.parametrize("dim", [1, -1])
def test_layouts(device, dim):
    image = torch.randn(3, 8, 8, 8, device=device, dtype=torch.float64)
    bias, weight = torch.randn(8, device=device).double(), torch.rand(8, device=device).double()
    for x in (image.contiguous(memory_format=torch.channels_last), image[:, :, ::2], image.transpose(1, 3)):
        g = torch.randn_like(x.transpose(0, 2)).transpose(0, 2)
        for operator, plain, given in (
            (ops.bias_gelu, reference.bias_gelu, (bias,)),
            (ops.prelu_bias, reference.prelu_bias, (weight, bias)),
        ):
            found = []
            for function in (operator, plain):
                leaves = [t.clone().requires_grad_() for t in (x, *given)]
                found.append(torch.autograd.grad(function(*leaves, dim=dim), leaves, g))
            torch.testing.assert_close(*found)


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)])
def test_only_what_is_asked_for(device, asked):
    x, bias, weight = tensors((6, 8), 1, torch.float64, device)
    grad = torch.randn_like(x)
    for function, given in (
        (lambda x, b: ops.bias_act(x, b), (x, bias)),
        (lambda x, b: ops.bias_relu(x, b), (x, bias)),
        (lambda x, w: ops.prelu_bias(x, w, bias), (x, weight)),
        (lambda x, b: ops.bias_dropout_add(x, b, torch.zeros_like(x), 0.0), (x, bias)),
    ):
        leaves = [t.clone().requires_grad_(i in asked) for i, t in enumerate(given)]
        got = torch.autograd.grad(function(*leaves), [leaves[i] for i in asked], grad)
        every = [t.clone().requires_grad_() for t in given]
        want = torch.autograd.grad(function(*every), every, grad)
        torch.testing.assert_close(got, tuple(want[i] for i in asked))


def test_the_same_at_every_call(device):
    x, bias, weight = tensors((3000, 40), 1, torch.float32, device)
    grad = torch.randn_like(x)
    first = OPERATORS.prelu_bias_gradients.default(grad, x, bias, weight, 1)
    for _ in range(3):
        for one, two in zip(first, OPERATORS.prelu_bias_gradients.default(grad, x, bias, weight, 1)):
            assert torch.equal(one, two)


def test_gradients_of_gradients(device):
    x, bias, weight = (t.requires_grad_() for t in tensors((3, 4), 1, torch.float64, device))
    assert torch.autograd.gradgradcheck(ops.prelu_bias, (x, weight, bias))
    assert torch.autograd.gradgradcheck(ops.bias_gelu, (x, bias))


def test_opcheck(device):
    x, bias, weight = tensors((6, 8, 5), 1, torch.float32, device)
    grad = torch.randn_like(x)
    for code, added in ((0, bias), (2, bias), (2, None), (1, None)):
        torch.library.opcheck(OPERATORS.bias_act_gradients.default, (grad, x, added, None, code, 0.01, 1))
    torch.library.opcheck(OPERATORS.bias_act_gradients.default, (grad, x, bias, grad, 4, 0.01, -2))
    torch.library.opcheck(OPERATORS.prelu_bias_gradients.default, (grad, x, bias, weight, 1))
    dropout = (grad, x, bias, None, 5, 7, 0.3, 2, 0.01, 1)
    torch.library.opcheck(OPERATORS.dropout_act_gradients.default, dropout)
