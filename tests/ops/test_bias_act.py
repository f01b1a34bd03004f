import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once, pairwise

from kfconvert import ops
from kfconvert.ops.fused.bias_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, dim, dtype, device, scale=3.0):
    x = torch.randn(shape, device=device).mul(scale).to(dtype)
    return x, torch.randn(shape[dim], device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, bias, residual = inputs((5, 7, 40), -1, dtype, device)
    for b, r in ((None, None), (bias, None), (None, residual), (bias, residual)):
        y = check_operator(ops.bias_act, reference, x, b, r, activation=activation, negative_slope=0.2)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(1,), (3,), (17,), (2, 3), (33, 1), (4, 1025), (0, 8), (8, 0), (3, 70_001)])
def test_shapes(device, shape):
    x, bias, residual = inputs(shape, -1, torch.float32, device)
    check_operator(ops.bias_act, reference, x, bias, residual, activation="gelu")


@pairwise(dtype=DTYPES, size=[(1, 1), (4, 4), (5, 7), (3, 129), (0, 4)], channels=[1, 3, 8])
def test_convolution_layouts(device, dtype, size, channels):
    x, bias, residual = inputs((2, channels, *size), 1, dtype, device)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    for layout in (x, channels_last):
        for r in (residual, residual.contiguous(memory_format=torch.channels_last)):
            y = check_operator(ops.bias_act, reference, layout, bias, r, activation="relu", dim=1)
            assert y.numel() == 0 or y.stride() == torch.relu(layout).stride()


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_bias_along_any_dim(device, dim):
    x, bias, residual = inputs((6, 10, 14), dim, torch.float32, device)
    for layout in (
        x,
        x.transpose(0, 2).contiguous().transpose(0, 2),
        x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    ):
        check_operator(ops.bias_act, reference, layout, bias, residual, activation="silu", dim=dim)


def test_strided_views(device):
    base, _, residual = inputs((12, 30), -1, torch.float32, device)
    bias = torch.randn(30, device=device)[::2]
    for view in (base[:, ::2], base[:, 1:16], base[::3, :15], base[0].expand(12, 30)[:, :15]):
        r = torch.randn(view.shape[::-1], device=device).t()
        check_operator(ops.bias_act, reference, view, bias, r, activation="tanh")


def test_misaligned_pointer(device):
    for offset in (1, 2, 3):
        x = torch.randn(1000 + offset, device=device).half()[offset:]
        check_operator(ops.bias_act, reference, x, activation="relu")
        check_operator(
            ops.bias_act,
            reference,
            x.view(10, 100),
            torch.randn(103, device=device).half()[3:],
            activation="relu",
        )


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_as_aten_in_float64(device, activation, dtype):
    # Not as ATen in the same dtype: its vectorised float32 GELU makes a NaN of +inf, its scalar one does not.
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        6.0,
        -3.0,
        3.0,
        1e-30,
        -1e-30,
        60000.0,
        -60000.0,
    ]
    x = torch.tensor(special * 5, device=device, dtype=dtype)
    got, want = ops.bias_act(x, activation=activation), reference(x.double(), activation=activation).to(dtype)
    torch.testing.assert_close(got, want, equal_nan=True)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_in_place(device, activation, dtype):
    x, bias, residual = inputs((4, 6, 5), 1, dtype, device)
    for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.repeat(1, 1, 2)[:, :, ::2]):
        want = ops.bias_act(layout, bias, residual, activation, dim=1)
        mine = layout.as_strided(layout.shape, layout.stride())
        code = ops.ACTIVATIONS[activation].code
        assert OPERATORS.bias_act_(mine, bias, residual, code, 0.01, 1) is None
        assert torch.equal(layout, want)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, activation, dtype):
    x, bias, residual = inputs((3, 8, 6), 1, dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype)]

    def run(function):
        return lambda x, b, r: function(x, b, r, activation=activation, negative_slope=0.2, dim=1)

    check_gradients(run(ops.bias_act), run(reference), [x, bias, residual], weights, activation=activation)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gradcheck(device, activation):
    x, bias, residual = inputs((2, 3, 4), 1, torch.float64, device)
    leaves = [t.requires_grad_() for t in (x, bias, residual)]
    code = ops.ACTIVATIONS[activation].code
    assert torch.autograd.gradcheck(lambda *t: OPERATORS.bias_act(*t, code, 0.2, 1), leaves)


def test_gradient_of_a_vector(device):
    x, bias = (torch.randn(5, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, b: ops.bias_act(x, b, activation="gelu"), (x, bias))


def test_gradients_with_other_layouts(device):
    x = torch.randn(2, 3, 4, 5, device=device, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(2, 3, 4, 5, device=device, dtype=torch.float64)
    for activation in ("relu", "silu"):
        got, want = (
            torch.autograd.grad(f(leaf, activation=activation), leaf, grad)[0]
            for f, leaf in ((f, x.clone().requires_grad_()) for f in (ops.bias_act, reference))
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs((2, 4, 3, 3), 1, torch.float32, device)]
        torch.library.opcheck(OPERATORS.bias_act.default, (*tensors, code, 0.01, 1))
    x, bias, residual = inputs((2, 4, 3, 3), 1, torch.float32, device)
    for operator in (OPERATORS.bias_act_inference, OPERATORS.bias_act_):
        torch.library.opcheck(operator.default, (x, bias, residual, code, 0.01, 1))
    torch.library.opcheck(OPERATORS.bias_act_backward.default, (x, x, None, None, code, 0.01, 1))
    torch.library.opcheck(OPERATORS.bias_act_inference.default, (x[:, ::2], None, residual[:, ::2], code, 0.01, 1))


def test_autocast_widens(device):
    x, bias, residual = inputs((4, 8), -1, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ops.bias_act(x.bfloat16(), bias, residual, "relu")
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, reference(x.bfloat16().float(), bias, residual, "relu"))


def test_errors(device, compiled):
    x, bias, residual = inputs((4, 8), -1, torch.float32, device)
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: none, relu"):
        ops.bias_act(x, activation="swish")
    for arguments, match in (
        (
            (x, bias[:5]),
            r"bias has shape \(5\), but x has 8 channels|bias has shape \(5,\), but x has 8 channels",
        ),
        ((x, None, residual[:2]), r"residual has shape \(2, 8\), expected \(4, 8\)"),
        ((x, bias.double()), "bias has another dtype than x"),
        ((x, None, residual.half()), "residual has another dtype than x"),
        ((x.int(),), "expected float64, float32, float16 or bfloat16"),
        ((x, bias, None, "relu", 0.01, 2), "dim 2 is out of range"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.bias_act(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.cuda
def test_mixed_devices():
    x = torch.randn(4, 8, device="cuda")
    with pytest.raises(RuntimeError, match="bias is on another device than x"):
        OPERATORS.bias_act_inference(x, torch.randn(8), None, 0, 0.01, -1)


@pytest.mark.cuda
@pytest.mark.parametrize("shape,dim", [((2**31 // 4096 + 3, 4096), -1), ((3, 8, 2**27 - 8), 1)])
@pytest.mark.gpu_memory(30)
def test_more_than_2_31_elements(shape, dim):
    x = torch.ones(shape, device="cuda", dtype=torch.float16)
    bias = torch.arange(shape[dim], device="cuda", dtype=torch.float16) % 7
    y = ops.bias_act(x, bias, activation="relu", dim=dim)
    want = bias + 1
    for part in (y[0], y[-1]):
        assert torch.equal(part, want.unsqueeze(-1).expand_as(part) if dim == 1 else want)


@pytest.mark.cuda
def test_other_stream_and_graph():
    x, bias = torch.randn(64, 128, device="cuda"), torch.randn(128, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = ops.bias_act(x, bias, activation="silu")
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, reference(x, bias, activation="silu"))
