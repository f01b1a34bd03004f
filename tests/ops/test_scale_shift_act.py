import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.scale_shift_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, dtype, device):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale, shift = torch.randn(2, shape[1], device=device, dtype=wide)
    return torch.randn(shape, device=device).mul(3).to(dtype), scale, shift


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    tensors = inputs((3, 8, 5, 8), dtype, device)
    check_operator(ops.scale_shift_act, reference, *tensors, activation=activation, negative_slope=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (5, 7),
        (1, 1),
        (3, 8),
        (2, 3, 5),
        (2, 16, 4, 4),
        (2, 16, 5, 7),
        (2, 6, 3, 129),
        (1, 24, 33, 65),
        (2, 3, 2, 3, 4),
        (0, 4, 4, 4),
        (2, 0, 3, 3),
        (3, 1, 9, 9),
    ],
)
def test_shapes_and_layouts(device, shape, dtype):
    x, scale, shift = inputs(shape, dtype, device)
    layouts = [x]
    if x.dim() > 3:
        layouts.append(x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d))
    for layout in layouts:
        y = check_operator(ops.scale_shift_act, reference, layout, scale, shift, activation="relu")
        assert y.numel() == 0 or y.stride() == torch.relu(layout).stride()
        assert y.data_ptr() != layout.data_ptr() or y.numel() == 0


def test_strided_and_misaligned(device):
    x, scale, shift = inputs((4, 16, 6, 10), torch.float16, device)
    for view in (x[..., ::2], x[:, :, 1:4], x[::2], x.transpose(2, 3)):
        check_operator(ops.scale_shift_act, reference, view, scale, shift, activation="silu")
    many = torch.randn(33, device=device)
    check_operator(ops.scale_shift_act, reference, x[:, :15], many[1:16], many[::2][:15])
    flat = torch.randn(2 * 16 * 8 + 3, device=device).half()
    for offset in (1, 2, 3):
        view = flat[offset : offset + 256].view(2, 16, 8)
        check_operator(ops.scale_shift_act, reference, view, many[1:17], many[3:19], activation="relu")


@pytest.mark.parametrize("activation", ["none", "relu", "hardsigmoid", "relu6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, activation, dtype):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 60000.0])
    x = special.repeat(2, 8, 3).to(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor([1.0, 0.0, -1.0, 1e-3, float("nan"), float("inf"), -0.5, 1.0], device=device, dtype=wide)
    shift = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 1.0, float("inf"), float("nan")], device=device, dtype=wide)
    got = ops.scale_shift_act(x, scale, shift, activation)
    want = reference(x.double(), scale.double(), shift.double(), activation).to(dtype)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    x, scale, shift = inputs((3, 8, 6), dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype)]
    mine, aten = ((lambda *t, f=f: f(*t, activation="silu")) for f in (ops.scale_shift_act, reference))
    check_gradients(mine, aten, [x, scale, shift], weights)


@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu", "hardsigmoid"])
def test_gradcheck(device, activation):
    leaves = [t.requires_grad_() for t in inputs((2, 3, 4), torch.float64, device)]
    code = ops.ACTIVATIONS[activation].code
    assert torch.autograd.gradcheck(lambda *t: OPERATORS.scale_shift_act(*t, code, 0.2), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device, dtype):
    code = ops.ACTIVATIONS["relu"].code
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs((2, 4, 3, 3), dtype, device)]
        torch.library.opcheck(OPERATORS.scale_shift_act.default, (*tensors, code, 0.01))
    x, scale, shift = inputs((2, 4, 3, 6), dtype, device)
    for layout in (x, x.contiguous(memory_format=torch.channels_last), x[..., ::2]):
        torch.library.opcheck(OPERATORS.scale_shift_act_inference.default, (layout, scale, shift, code, 0.01))


def test_errors(device, compiled):
    x, scale, shift = inputs((4, 8, 2), torch.float32, device)
    with pytest.raises(ValueError, match="unknown activation 'swish'; known: none, relu"):
        ops.scale_shift_act(x, scale, shift, "swish")
    for arguments, match in (
        ((x, scale[:5], shift), r"scale has shape \(5,?\), but x has 8 channels"),
        ((x, scale, shift[None]), r"shift has shape \(1, 8\), but x has 8 channels"),
        ((x, scale.double(), shift), "scale must be float32"),
        ((x.half(), scale.half(), shift), "scale must be float32"),
        ((x.double(), scale.double(), shift), "shift must be float64"),
        ((x.int(), scale, shift), "expected float64, float32, float16 or bfloat16"),
        ((x[0, 0], scale, shift), r"expected \(N, C, ...\)"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.scale_shift_act(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.cuda
def test_mixed_devices():
    x, scale, shift = inputs((4, 8, 2), torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="scale is on another device than x"):
        OPERATORS.scale_shift_act_inference(x, scale.cpu(), shift, 0, 0.01)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.gpu_memory(30)
def test_more_than_2_31_elements(layout):
    x = torch.ones((3, 8, 2**14, 2**13 - 1), device="cuda", dtype=torch.float16)
    x = x.contiguous(memory_format=layout)
    scale = torch.arange(8, device="cuda", dtype=torch.float32)
    y = ops.scale_shift_act(x, scale, scale + 1, "relu")
    for part in (y[0], y[-1]):
        assert torch.equal(part, (2 * scale + 1).half()[:, None, None].expand_as(part))
