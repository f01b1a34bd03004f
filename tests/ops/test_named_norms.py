"""The named norms against their definitions in plain ATen."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.kernels.reference import batch_norm_act as batch_norm


def arguments(name, dtype, device, shape=(3, 6, 8)):
    """(tensors, the others by name) of a call with an x of ``shape``."""
    channels = shape[1] if name in ("group_norm_silu", "batch_norm_relu") else shape[-1]

    def vector(spread=0.3, around=0.0):
        return torch.randn(channels, device=device).mul(spread).add(around).to(dtype)

    x = torch.randn(shape, device=device).mul(2).add(0.5).to(dtype)
    if name == "batch_norm_relu":
        return [x, vector(around=1), vector(), vector(), vector().abs() + 0.5], {}
    if name == "group_norm_silu":
        return [x, vector(around=1), vector()], {"num_groups": 2}
    rest = {"normalized_shape": channels, "eps": 1e-5}
    if name.startswith("add"):
        residual = [torch.randn(shape, device=device).to(dtype)]
    else:
        residual = []
    return [x, *residual, vector(around=1), *([] if "rms" in name else [vector()])], rest


def call(package, name, rest):
    """A function of the tensors alone."""
    if name == "batch_norm_relu":
        names = ["x", "weight", "bias", "running_mean", "running_var"]
    else:
        names = ["x", "residual", "weight", "bias"] if name.startswith("add") else ["x", "weight", "bias"]
    return lambda *tensors: getattr(package, name)(**dict(zip(names, tensors)), **rest)


@pytest.mark.parametrize("shape", [(1, 4), (2, 0, 3), (2, 4, 0), (0, 4, 3)])
def test_group_norm_is_the_same_with_a_gradient(device, compiled, shape):
    tensors = [torch.randn(s, device=device, dtype=torch.float64) for s in (shape, shape[1:2], shape[1:2])]
    groups = shape[1] or 2
    want = ops.group_norm_silu(tensors[0], groups, *tensors[1:])
    leaves = [t.requires_grad_() for t in tensors]
    for package in (ops, reference):
        y = package.group_norm_silu(leaves[0], groups, *leaves[1:])
        torch.testing.assert_close(y, want)
        grads = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(grads[0], torch.zeros_like(grads[0]))
    assert torch.autograd.gradcheck(lambda *t: ops.group_norm_silu(t[0], groups, *t[1:]), leaves)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_the_sum_requires_a_gradient_where_its_terms_do(device, compiled, name):
    tensors, rest = arguments(name, torch.float32, device)
    for wanted in range(len(tensors)):
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(i == wanted)
        y, total = call(ops, name, rest)(*tensors)
        assert y.requires_grad and total.requires_grad == (wanted < 2)
        want = torch.autograd.grad(call(reference, name, rest)(*tensors)[0].square().sum(), tensors[wanted])
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), tensors[wanted]), want)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_result_is_an_argument(device, compiled, name, requires_grad):
    x = torch.randn(3, 8, device=device, requires_grad=requires_grad)
    for package in (ops, reference):
        _, total = getattr(package, name)(x, None, 8)
        assert torch.equal(total, x) and total.requires_grad == requires_grad
        assert total.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_eps_of_rms_norm(device, dtype):
    x = torch.full((2, 8), 1e-4, device=device, dtype=dtype)
    want = F.rms_norm(x, (8,))
    torch.testing.assert_close(ops.rms_norm(x, 8), want)
    torch.testing.assert_close(ops.rms_norm_gelu(x, (8,)), F.gelu(want))
    torch.testing.assert_close(ops.add_rms_norm(x, torch.zeros_like(x), 8)[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_batch_norm_updates_statistics_in_training(device, compiled, dtype, requires_grad):
    (x, *affine, mean, var), _ = arguments("batch_norm_relu", dtype, device, (4, 6, 5, 5))
    x.requires_grad_(requires_grad)
    mine, theirs = ([mean.clone(), var.clone()] for _ in "ab")
    y = ops.batch_norm_relu(x, *affine, *mine, training=True, momentum=0.3, eps=1e-3)
    want = F.relu(F.batch_norm(x, *theirs, *affine, training=True, momentum=0.3, eps=1e-3))
    assert torch.equal(y, want) and torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    plain = F.batch_norm(x, None, None, training=True).relu()
    assert torch.equal(ops.batch_norm_relu(x, None, None, None, None, training=True), plain)
    if requires_grad:
        grads = [torch.autograd.grad(result.square().sum(), x)[0] for result in (y, want)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(7, 6), (7, 6, 3)])
def test_batch_norm_with_strided_vectors(device, shape, training):
    x, *vectors = arguments("batch_norm_relu", torch.float32, device, shape)[0]
    for strided in range(4):
        grads = []
        for given in (vectors, [v.repeat_interleave(3)[::3] if i == strided else v for i, v in enumerate(vectors)]):
            *affine, mean, var = (v.detach() for v in given)
            leaves = [t.requires_grad_() for t in (x.clone(), *affine)]
            y = ops.batch_norm_relu(*leaves, mean.clone() if training else mean, var, training=training)
            grads.append(torch.autograd.grad(y.square().sum(), leaves))
        torch.testing.assert_close(*grads)


def batch_norm_inputs(shape, dtype, device):
    x, mean, weight, bias = (torch.randn(size, device=device) for size in (shape, *[shape[1]] * 3))
    return [t.to(dtype) for t in (x, mean, torch.rand(shape[1], device=device) + 0.2, weight, bias)]


def test_the_definition_of_batch_norm_act(device):
    x, mean, variance, weight, bias = batch_norm_inputs((2, 8, 4, 6), torch.float32, device)
    want = F.silu(F.batch_norm(x, mean, variance, weight, bias, eps=1e-3))
    torch.testing.assert_close(batch_norm(x, mean, variance, weight, bias, 1e-3, "silu"), want)


def test_large_mean_costs_no_digits(device):
    """x - mean is small beside either: what is summed up for the weight is the difference, not two sums."""
    x, mean, variance, weight, bias = batch_norm_inputs((64, 4, 8, 8), torch.float32, device)
    x, mean = x + 1000, mean + 1000
    grad = torch.randn_like(x)
    got, want = [], []
    for found, function, dtype in ((got, ops.batch_norm_act, torch.float32), (want, batch_norm, torch.float64)):
        leaf = weight.to(dtype).requires_grad_()
        y = function(x.to(dtype), mean.to(dtype), variance.to(dtype), leaf, bias.to(dtype))
        found.append(torch.autograd.grad(y, leaf, grad.to(dtype))[0])
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-3)
