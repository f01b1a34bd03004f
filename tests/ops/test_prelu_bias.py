"""prelu_bias against plain ATen: layouts, channels, gradients, errors."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, dim, dtype, device):
    x, bias = torch.randn(shape, device=device), torch.randn(shape[dim], device=device)
    return [t.to(dtype) for t in (x, torch.rand(shape[dim], device=device), bias)]


def test_the_definition(device):
    image, weight, bias = inputs((2, 8, 4, 6), 1, torch.float32, device)
    want = F.prelu(image + bias[:, None, None], weight)
    torch.testing.assert_close(reference.prelu_bias(image, weight, bias, dim=1), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8,), 0),
        ((5, 8), -1),
        ((3, 70_001), 1),
        ((2, 8, 4, 6), 1),
        ((2, 7, 3, 5), 1),
        ((4, 6, 9), 0),
        ((0, 8), 1),
    ],
)
def test_as_accurate_as_aten(device, shape, dim, dtype):
    x, weight, bias = inputs(shape, dim, dtype, device)
    check_operator(ops.prelu_bias, reference.prelu_bias, x, weight, bias, dim=dim)
    check_operator(ops.prelu_bias, reference.prelu_bias, x, weight[:1], bias, dim=dim)


def test_layouts(device):
    image, weight, bias = inputs((2, 8, 4, 6), 1, torch.float32, device)
    for x in (image.contiguous(memory_format=torch.channels_last), image[:, :, ::2], image.transpose(2, 3)):
        y = check_operator(ops.prelu_bias, reference.prelu_bias, x, weight, bias, dim=1)
        assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    weights = [torch.randn(3, 8, 6, device=device).to(dtype)]

    def of(function):
        return lambda x, weight, bias: function(x, weight, bias, dim=1)

    tensors = inputs((3, 8, 6), 1, dtype, device)
    check_gradients(of(ops.prelu_bias), of(reference.prelu_bias), tensors, weights)


def test_gradcheck(device):
    leaves = [t.requires_grad_() for t in inputs((3, 4), 1, torch.float64, device)]
    assert torch.autograd.gradcheck(ops.prelu_bias, leaves)
    shared = torch.rand(1, device=device, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ops.prelu_bias, (leaves[0], shared, leaves[2]))


def test_opcheck(device):
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs((2, 8, 3), 1, torch.float32, device)]
        torch.library.opcheck(OPERATORS.prelu_bias.default, (*tensors, 1))


def test_autocast(device, compiled):
    x, weight, bias = inputs((4, 8), 1, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ops.prelu_bias(x.bfloat16(), weight, bias).dtype is torch.float32


def test_errors(device, compiled):
    x, weight, bias = inputs((4, 8), 1, torch.float32, device)
    for arguments, match in (
        ((x, weight, bias[:3]), r"bias has shape \(3,?\), but x has 8 channels"),
        ((x, weight[:3], bias), r"weight has shape \(3,?\)"),
        ((x, weight, bias.double()), "bias has another dtype than x"),
        ((x.int(), weight.int(), bias.int()), "expected float64, float32, float16 or bfloat16"),
        ((x, weight, bias, 2), r"dim 2 is out of range for x of shape \(4, 8\)"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.prelu_bias(*arguments)
