import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.conv_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(dtype, device, x=(2, 8, 7, 9), weight=(12, 8, 3, 3)):
    tensors = torch.randn(x), torch.randn(weight), torch.randn(weight[0])
    return tuple(t.to(device, dtype) for t in tensors)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, weight, bias = inputs(dtype, device)
    residual = torch.randn(2, 12, 7, 9, device=device).to(dtype)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        check_operator(ops.conv_act, reference, x, weight, b, r, padding=1, activation=activation, negative_slope=0.2)


@pytest.mark.filterwarnings("ignore:Using padding")  # by plain ATen, the reference
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stride": 2},
        {"stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
        {"dilation": 2, "padding": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": "same", "dilation": 3},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_arguments_and_layouts(device, arguments, dtype, channels_last):
    x, weight, bias = inputs(dtype, device, weight=(12, 8, 3, 2))
    if channels_last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    want = reference(x, weight, bias, **arguments)
    residual = torch.randn_like(want)
    for r in (
        None,
        residual,
        residual.contiguous(memory_format=torch.channels_last),
        residual.mT.contiguous().mT,
    ):
        y = check_operator(ops.conv_act, reference, x, weight, bias, r, activation="relu", **arguments)
        assert y.stride() == want.stride()


@pytest.mark.parametrize(
    "x,weight,groups",
    [
        ((2, 6, 11), (4, 6, 3), 1),
        ((2, 6, 11), (6, 1, 3), 6),
        ((2, 8, 5, 5), (12, 2, 3, 3), 4),
        ((2, 8, 5, 5), (8, 1, 3, 3), 8),
        ((1, 3, 4, 5, 6), (5, 3, 2, 2, 2), 1),
        ((0, 8, 5, 5), (4, 8, 3, 3), 1),
        ((8, 5, 5), (4, 8, 3, 3), 1),
        ((1, 1, 1, 1), (1, 1, 1, 1), 1),
    ],
)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_shapes(device, x, weight, groups, activation):
    x, weight, bias = inputs(torch.float32, device, x, weight)
    residual = torch.randn_like(reference(x, weight, groups=groups))
    for r in (None, residual):
        check_operator(ops.conv_act, reference, x, weight, bias, r, groups=groups, activation=activation)


@each_once(activation=ops.ACTIVATIONS, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_gradients(device, activation, dtype):
    x, weight, bias = inputs(dtype, device, (1, 4, 5, 5), (6, 4, 3, 3))
    residual = torch.randn(1, 6, 5, 5, device=device).to(dtype)
    weights = [torch.randn(1, 6, 5, 5, device=device).to(dtype)]

    def run(function):
        return lambda *tensors: function(*tensors, padding=1, activation=activation, negative_slope=0.2)

    check_gradients(run(ops.conv_act), run(reference), [x, weight, bias, residual], weights, activation=activation)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_gradcheck(device, activation):
    leaves = [t.requires_grad_() for t in inputs(torch.float64, device, (1, 2, 4, 4), (2, 2, 3, 3))]
    residual = torch.randn(1, 2, 4, 4, device=device, dtype=torch.float64, requires_grad=True)
    code = ops.ACTIVATIONS[activation].code
    assert torch.autograd.gradcheck(
        lambda *t: OPERATORS.conv_act(*t, [1], [1], [1], 1, code, 0.01), (*leaves, residual)
    )


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    residual = torch.randn(2, 12, 7, 9, device=device)
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs(torch.float32, device)]
        torch.library.opcheck(OPERATORS.conv_act.default, (*tensors, residual, [1, 1], [1, 1], [1, 1], 1, code, 0.01))
    x, weight, bias = inputs(torch.float32, device)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        arguments = (layout, weight, bias, None, [1], [1], [1], 1, code, 0.01)
        torch.library.opcheck(OPERATORS.conv_act_inference.default, arguments)


def test_autocast(device, compiled):
    x, weight, bias = inputs(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = (
            ops.conv_act(x, weight, bias, activation="relu"),
            reference(x, weight, bias, activation="relu"),
        )
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=1.6e-2, atol=1e-2)  # one rounding to bfloat16 against two


def test_errors(device, compiled):
    x, weight, bias = inputs(torch.float32, device)
    for arguments, match in (
        ((x, weight[:, :5]), "x has 8 channels, expected 5"),
        ((x[0, 0], weight), "does not fit weight of shape"),
        ((x, weight, bias[:5]), r"bias has shape \(5,?\), expected \(12,\)"),
        ((x, weight.double()), "weight has another dtype than x"),
        ((x, weight, bias, x.half()), "residual has another dtype than x"),
        ((x, weight, bias, x), "residual has shape|must match the size"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.conv_act(*arguments, activation="relu")
        assert "\n" not in str(error.value)
    for stride in (2, (2,), (1, 2)):
        with pytest.raises(RuntimeError, match='conv_act: padding "same" needs a stride of 1') as error:
            ops.conv_act(x, weight, padding="same", stride=stride)
        assert "\n" not in str(error.value)
    assert ops.conv_act(x, weight, padding="same", stride=(1, 1)).shape[2:] == x.shape[2:]
    with pytest.raises(ValueError, match='padding must be numbers, "valid" or "same"'):
        ops.conv_act(x, weight, padding="full")


@pytest.mark.parametrize(
    "arguments,match",
    [
        ({"stride": 0}, r"stride \(0, 0\) and dilation \(1, 1\) must be positive"),
        ({"stride": (1, -1)}, r"stride \(1, -1\) and dilation"),
        ({"dilation": 0}, r"dilation \(0, 0\) must be positive"),
        ({"padding": -1}, r"padding \(-1, -1\) not negative"),
        ({"dilation": 9}, r"x of shape \(2, 8, 7, 9\) with padding \(0, 0\) is smaller than weight of shape"),
        ({"padding": 10**12}, r"padding \(1000000000000, 1000000000000\) makes too large an output"),
        ({"padding": "same", "dilation": (1, 2, 3)}, r"dilation needs 1 or 2 numbers, got \(1, 2, 3\)"),
        ({"stride": (1, 2, 3)}, "needs? 1 or 2 numbers"),
    ],
)
def test_geometry_errors(device, compiled, capfd, arguments, match):
    """One line, with the operator's name, and nothing on stderr beside it."""
    x, weight, bias = inputs(torch.float32, device)
    for requires_grad in (False, True):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.conv_act(x.requires_grad_(requires_grad), weight, bias, **arguments)
        assert str(error.value).startswith("kfconvert::conv_act: ") and "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_an_empty_image(device, compiled, capfd):
    x, weight, bias = inputs(torch.float32, device, x=(2, 8, 0, 9), weight=(12, 8, 1, 3))
    with pytest.raises(RuntimeError, match=r"kfconvert::conv_act: x of shape \(2, 8, 0, 9\) with padding \(1, 1\)"):
        ops.conv_act(x, weight, bias, padding=1)
    assert capfd.readouterr().err == ""


def test_groups_that_do_not_divide_the_output(device, compiled):
    x, weight, bias = inputs(torch.float32, device, weight=(9, 4, 3, 3))
    with pytest.raises(RuntimeError, match="weight has 9 output channels, which 2 groups do not divide"):
        ops.conv_act(x, weight, bias, groups=2)
