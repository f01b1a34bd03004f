import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.group_norm_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, dtype, device, offset=0.0):
    x = torch.randn(shape, device=device).mul(3).add(offset).to(dtype)
    return x, *torch.randn(2, shape[1], device=device).to(dtype)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, weight, bias = inputs((3, 8, 5, 8), dtype, device)
    for w, b in ((weight, bias), (None, bias), (weight, None), (None, None)):
        check_operator(ops.group_norm_act, reference, x, 4, w, b, activation=activation, negative_slope=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 6), 3),
        ((1, 4, 1), 2),
        ((2, 6, 5), 6),
        ((2, 6, 5), 1),
        ((1, 8, 33, 65), 2),
        ((2, 16, 32, 32), 4),
        ((2, 4, 3, 4, 8), 2),
        ((0, 4, 3, 3), 2),
        ((2, 4, 0, 3), 2),
    ],
)
def test_shapes(device, shape, groups, dtype):
    x, weight, bias = inputs(shape, dtype, device)
    y = ops.group_norm_act(x, groups, weight, bias, activation="silu")
    assert y.shape == x.shape and y.is_contiguous()
    if x.numel() > 0:
        check_operator(ops.group_norm_act, reference, x, groups, weight, bias, 1e-6, "silu")


def test_rows_far_from_zero(device):
    x, weight, bias = inputs((2, 8, 64, 64), torch.float32, device, offset=300.0)
    check_operator(ops.group_norm_act, reference, x, 2, weight, bias)


@pytest.mark.parametrize("inner", [1, 5, 64, 1000, 40000])
def test_nothing_is_left_of_equal_values(device, inner):
    values = torch.tensor([0.1709, 1.3, -7.77, 1e4, 1e-4], device=device)
    x = values[:, None, None].expand(5, 4, inner).contiguous()
    assert torch.equal(ops.group_norm_act(x, 2, eps=1e-12), torch.zeros_like(x))


def test_other_layouts(device):
    x, weight, bias = inputs((2, 8, 6, 10), torch.float32, device)
    many = torch.randn(16, device=device)
    for view in (x.contiguous(memory_format=torch.channels_last), x[..., ::2], x.transpose(2, 3), x[:, :, 1:]):
        y = ops.group_norm_act(view, 2, weight, many[::2], activation="relu")
        assert y.is_contiguous()
        torch.testing.assert_close(y, reference(view, 2, weight, many[::2], activation="relu"))


def test_special_values(device):
    x, weight, bias = inputs((4, 8, 4, 4), torch.float32, device)
    x[0, 0, 1, 1], x[1, 5, 2, 2], x[2, 7, 0, 0] = float("nan"), float("inf"), -float("inf")
    for activation in ("none", "relu", "silu", "sigmoid"):
        got = ops.group_norm_act(x, 2, weight, bias, activation=activation)
        torch.testing.assert_close(got, reference(x, 2, weight, bias, activation=activation), equal_nan=True)
        assert got.isnan().sum() == 3 * 4 * 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    x, weight, bias = inputs((3, 8, 6), dtype, device)
    grads = [torch.randn(x.shape, device=device).to(dtype)]
    mine, aten = ((lambda x, w, b, f=f: f(x, 4, w, b, activation="silu")) for f in (ops.group_norm_act, reference))
    check_gradients(mine, aten, [x, weight, bias], grads)


def test_gradcheck(device):
    leaves = [t.requires_grad_() for t in inputs((2, 4, 3), torch.float64, device)]
    code = ops.ACTIVATIONS["silu"].code
    assert torch.autograd.gradcheck(lambda x, w, b: OPERATORS.group_norm_act(x, 2, w, b, 1e-5, code, 0.01), leaves)


def test_opcheck(device):
    code = ops.ACTIVATIONS["silu"].code
    for requires_grad in (False, True):
        x, *affine = (t.requires_grad_(requires_grad) for t in inputs((2, 4, 3, 3), torch.float32, device))
        torch.library.opcheck(OPERATORS.group_norm_act.default, (x, 2, *affine, 1e-5, code, 0.01))
    x, *affine = inputs((2, 4, 3, 3), torch.float32, device)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.library.opcheck(OPERATORS.group_norm_act_inference.default, (layout, 2, *affine, 1e-5, code, 0.01))


def test_errors(device, compiled):
    x, weight, bias = inputs((4, 8, 2), torch.float32, device)
    for arguments, match in (
        ((x, 3), "8 channels do not make 3 groups"),
        ((x, 0), "8 channels do not make 0 groups"),
        ((x, 2, weight[:5]), r"weight has shape \(5,?\), but x has 8 channels"),
        ((x, 2, weight, bias.double()), "bias has another dtype than x"),
        ((x.int(), 2), "expected float64, float32, float16 or bfloat16"),
        ((x[0, 0], 2), r"expected \(N, C, ...\)"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.group_norm_act(*arguments)
