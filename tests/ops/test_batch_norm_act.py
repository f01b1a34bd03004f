"""batch_norm_act against F.batch_norm and an activation: layouts, parameters, gradients, errors."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator
from support.selection import pairwise

from kfconvert import ops
from kfconvert.ops.standalone.batch_norm_act import reference

OPERATORS = torch.ops.kfconvert
SHAPES = [(4, 8), (2, 8, 4, 4), (3, 7, 5, 3), (2, 16, 3), (1, 4, 70_001)]
SHAPES += [(300, 8, 2, 2), (2, 1, 9, 8), (0, 8, 4), (5, 96)]


def inputs(shape, dtype, device):
    x, mean, weight, bias = (torch.randn(size, device=device) for size in (shape, *[shape[1]] * 3))
    return [t.to(dtype) for t in (x, mean, torch.rand(shape[1], device=device) + 0.2, weight, bias)]


def with_activation(function, activation):
    return lambda x, mean, variance, weight=None, bias=None: function(
        x, mean, variance, weight, bias, 1e-3, activation, 0.1
    )


def test_the_definition(device):
    x, mean, variance, weight, bias = inputs((2, 8, 4, 6), torch.float32, device)
    want = F.silu(F.batch_norm(x, mean, variance, weight, bias, eps=1e-3))
    torch.testing.assert_close(reference(x, mean, variance, weight, bias, 1e-3, "silu"), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_aten(device, shape, dtype):
    x, mean, variance, *affine = inputs(shape, dtype, device)
    for activation, parameters in (("relu", affine), ("gelu", [None, None]), ("none", [affine[0], None])):
        functions = (with_activation(f, activation) for f in (ops.batch_norm_act, reference))
        check_operator(*functions, x, mean, variance, *parameters)


def test_layouts(device):
    image, *vectors = inputs((2, 8, 4, 6), torch.float32, device)
    for x in (image.contiguous(memory_format=torch.channels_last), image[:, :, ::2], image.transpose(2, 3)):
        y = check_operator(ops.batch_norm_act, reference, x, *vectors)
        assert y.stride() == torch.empty_like(x).stride()


def test_float32_parameters_beside_a_half_type(device, compiled):
    x, *vectors = inputs((4, 8, 5, 5), torch.float32, device)
    y = ops.batch_norm_act(x.half(), *vectors)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), F.batch_norm(x.half().float(), *vectors), rtol=1e-3, atol=2e-3)
    leaves = [x.half().requires_grad_(), *vectors[:2], *(v.requires_grad_() for v in vectors[2:])]
    grads = torch.autograd.grad(ops.batch_norm_act(*leaves).float().sum(), [leaves[0], *leaves[3:]])
    assert [g.dtype for g in grads] == [torch.float16, torch.float32, torch.float32]


@pairwise(
    dtype=DTYPES,
    activation=["none", "relu", "gelu", "tanh", "leaky_relu"],
    shape=[(6, 8), (3, 8, 4, 4), (3, 7, 5, 3)],
)
def test_gradients(device, shape, activation, dtype):
    x, mean, variance, *affine = inputs(shape, dtype, device)
    weights = [torch.randn(shape, device=device).to(dtype)]

    def of(function):
        def call(x, weight, bias):
            statistics = mean.to(x.dtype), variance.to(x.dtype)
            return with_activation(function, activation)(x, *statistics, weight, bias)

        return call

    check_gradients(of(ops.batch_norm_act), of(reference), [x, *affine], weights)


@pytest.mark.parametrize("shape", [(2, 1, 33), (40, 1), (1, 3, 20_000), (900, 2, 3)])
def test_gradients_of_few_channels(device, shape):
    x, mean, variance, weight, bias = inputs(shape, torch.float64, device)
    grad = torch.randn_like(x)
    found = []
    for function in (ops.batch_norm_act, reference):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = function(leaves[0], mean, variance, *leaves[1:], activation="silu")
        found.append(torch.autograd.grad(y, leaves, grad))
    torch.testing.assert_close(*found)


def test_gradients_of_images_in_channels_last(device):
    x, mean, variance, weight, bias = inputs((3, 8, 5, 4), torch.float64, device)
    grad = torch.randn(x.shape, dtype=x.dtype, device=device).transpose(2, 3).contiguous().transpose(2, 3)
    found = []
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        leaves = [t.clone().requires_grad_() for t in (image, weight, bias)]
        y = ops.batch_norm_act(leaves[0], mean, variance, *leaves[1:], activation="silu")
        found.append(torch.autograd.grad(y, leaves, grad))
    torch.testing.assert_close(*found)


def test_large_mean_costs_no_digits(device):
    """x - mean is small beside either: what is summed up for the weight is the difference, not two sums."""
    x, mean, variance, weight, bias = inputs((64, 4, 8, 8), torch.float32, device)
    x, mean = x + 1000, mean + 1000
    grad = torch.randn_like(x)
    got, want = [], []
    for found, function, dtype in ((got, ops.batch_norm_act, torch.float32), (want, reference, torch.float64)):
        leaf = weight.to(dtype).requires_grad_()
        y = function(x.to(dtype), mean.to(dtype), variance.to(dtype), leaf, bias.to(dtype))
        found.append(torch.autograd.grad(y, leaf, grad.to(dtype))[0])
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-3)


def test_gradcheck(device):
    x, mean, variance, weight, bias = inputs((3, 4, 2), torch.float64, device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def call(x, weight, bias):
        return ops.batch_norm_act(x, mean, variance, weight, bias, activation="gelu")

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_opcheck(device):
    x, mean, variance, weight, bias = inputs((2, 8, 3), torch.float32, device)
    for requires_grad in (False, True):
        for affine in ((weight, bias), (None, None), (weight, None)):
            learned = [None if t is None else t.clone().requires_grad_(requires_grad) for t in affine]
            arguments = (x.clone().requires_grad_(requires_grad), mean, variance, *learned, 1e-5, 1, 0.01)
            torch.library.opcheck(OPERATORS.batch_norm_act.default, arguments)
    torch.library.opcheck(
        OPERATORS.batch_norm_act_gradients.default,
        (torch.randn_like(x), x, mean, variance, weight.detach(), None, 1e-5, 2, 0.01),
    )


def test_errors(device, compiled):
    x, mean, variance, weight, bias = inputs((4, 8), torch.float32, device)
    for arguments, match in (
        ((x, mean[:3], variance), r"mean has shape \(3,?\), but x has 8 channels in dim 1"),
        ((x, mean, variance, weight.double()), "weight has another dtype than mean"),
        ((x, mean.half(), variance.half()), "mean has another dtype than x"),
        ((x[0], mean, variance), r"x has shape \(8,?\), expected \(N, C, ...\)"),
        ((x.int(), mean, variance), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.batch_norm_act(*arguments)
