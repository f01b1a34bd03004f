"""quantize_int8 gives exactly the integers of its definition, dequantize_int8 its numbers."""

import pytest
import torch
from helpers import DTYPES

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
SHAPES = [((8,), 0), ((5, 16), -1), ((3, 70_001), 0), ((2, 8, 4, 6), 1), ((2, 7, 3, 5), 1), ((0, 8), -1)]


def parameters(shape, dim, dtype, device):
    """Scales and zero points for all, and for each channel."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = torch.rand(shape[dim], device=device, dtype=wide) * 0.05 + 0.01
    points = torch.randint(-40, 40, (shape[dim],), device=device)
    one = torch.tensor(0.0371, device=device)
    return [
        (0.0371, 3), (0.02, 0), (one, torch.tensor(-7, device=device)), (one.reshape(1), -7), (scales, points),
        (scales, 5), (0.03, points), (scales, points[:1]), (scales, points.float()), (scales, points.int()),
        (0.02, points[:1].int()),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_exact_integers(device, shape, dim, dtype):
    x = torch.randn(shape, device=device).mul(2).to(dtype)
    for scale, zero_point in parameters(shape, dim, dtype, device):
        q = ops.quantize_int8(x, scale, zero_point, dim)
        assert q.dtype == torch.int8 and torch.equal(q, reference.quantize_int8(x, scale, zero_point, dim))


def test_every_float_of_the_half_types(device):
    bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[~x.isnan()]
        for scale, zero_point in ((0.1, 0), (1.0, -3), (1e-3, 100)):
            assert torch.equal(ops.quantize_int8(x, scale, zero_point), reference.quantize_int8(x, scale, zero_point))


def test_one_value_and_none(device):
    one = torch.full((1,), 0.1, device=device)
    x = torch.tensor(1.04, device=device)
    for package in (ops, reference):
        for scale in (one, one[0], 0.1):
            for zero_point in (2, torch.tensor([2], device=device)):
                q = package.quantize_int8(x, scale, zero_point)
                assert q.shape == () and q == 12
                y = package.dequantize_int8(q, scale, zero_point)
                assert y.shape == () and abs(y - 1) < 1e-6
        assert package.dequantize_int8(q, one.clone().requires_grad_()).shape == ()
    none = torch.empty(3, 0, 5, device=device)
    for parameters in ((one, none[0, :, 0]), (none[0, :, 0], one), (none[0, :, 0], 0), (0.1, none[0, :, 0])):
        for package in (ops, reference):
            q = package.quantize_int8(none, *parameters, dim=1)
            assert q.shape == package.dequantize_int8(q, *parameters, dim=1).shape == none.shape


def test_without_data():
    x, one = torch.empty((), device="meta"), torch.empty(1, device="meta")
    assert ops.quantize_int8(x, one).shape == ops.dequantize_int8(x.to(torch.int8), one, one).shape == ()


def test_half_way_cases_and_special_values(device, compiled):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e30, -1e30, float("inf"), -float("inf"), float("nan")])
    q = ops.quantize_int8(x.to(device), 1.0)
    assert q.tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, 127, -128, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_back(device, shape, dim, dtype):
    q = torch.randint(-128, 128, shape, device=device).to(torch.int8)
    for scale, zero_point in parameters(shape, dim, dtype, device):
        y = ops.dequantize_int8(q, scale, zero_point, dim, dtype=dtype)
        assert torch.equal(y, reference.dequantize_int8(q, scale, zero_point, dim, dtype=dtype)) and y.dtype == dtype


def test_layouts(device):
    image, scales = torch.randn(2, 8, 4, 6, device=device), torch.rand(8, device=device) + 0.1
    for x in (image.contiguous(memory_format=torch.channels_last), image[:, :, ::2], image.transpose(2, 3)):
        q = ops.quantize_int8(x, scales, 1, dim=1)
        assert torch.equal(q, reference.quantize_int8(x, scales, 1, dim=1))
        y = ops.dequantize_int8(q, scales, 1, dim=1)
        assert torch.equal(y, reference.dequantize_int8(q, scales, 1, dim=1))
        assert q.stride() == y.stride() == torch.empty_like(x).stride()


def test_misaligned_pointers(device):
    x = torch.randn(8 * 64 + 1, device=device)[1:]
    q = ops.quantize_int8(x, 0.1)
    assert torch.equal(q, reference.quantize_int8(x, 0.1))
    assert torch.equal(ops.dequantize_int8(q[1:9], 0.1), reference.dequantize_int8(q[1:9], 0.1))


def test_a_scale_is_learned(device):
    q = torch.randint(-128, 128, (3, 8), device=device).to(torch.int8)
    scale = torch.rand(8, device=device, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ops.dequantize_int8(q, s, 3, dtype=torch.float64), (scale,))


def test_opcheck(device):
    x, scales = torch.randn(4, 8, device=device), torch.rand(8, device=device) + 0.1
    q = ops.quantize_int8(x, 0.1)
    for values in ((scales, scales, 0.0, 0.0), (None, None, 0.1, 2.0)):
        torch.library.opcheck(OPERATORS.quantize_int8.default, (x, *values, -1))
        torch.library.opcheck(OPERATORS.dequantize_int8.default, (q, *values, -1, x.new_empty(0)))


def test_errors(device, compiled):
    x = torch.randn(4, 8, device=device)
    for call, match in (
        (lambda: ops.quantize_int8(x.int(), 0.1), "expected float64, float32, float16 or bfloat16"),
        (lambda: ops.dequantize_int8(x, 0.1), "expected int8"),
        (lambda: ops.dequantize_int8(x.to(torch.int8), 0.1, dtype=torch.int32), "expected float64, float32"),
        (lambda: ops.quantize_int8(x, x[0, :3]), r"scale has shape \(3,?\), but x has 8 channels in dim -1"),
        (lambda: ops.quantize_int8(x, 0.1, x), r"zero_point has shape \(4, 8\), but x has 8 channels"),
        (lambda: ops.quantize_int8(x, x[0], dim=2), r"dim 2 is out of range for x of shape \(4, 8\)"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()


def test_compile(device):
    x, scales = torch.randn(4, 8, device=device), torch.rand(8, device=device) + 0.1
    compiled = torch.compile(
        lambda x: ops.dequantize_int8(ops.quantize_int8(x, scales), scales), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x), reference.dequantize_int8(reference.quantize_int8(x, scales), scales))


@pytest.mark.cuda
def test_two_devices():
    with pytest.raises(RuntimeError, match="scale is on another device than x"):
        ops.quantize_int8(torch.ones(3, device="cuda"), torch.ones(3))


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
def test_more_elements_than_32_bits_count():
    x = torch.ones(2**31 + 4096, device="cuda", dtype=torch.float16)
    x[-5:] = 2
    q = ops.quantize_int8(x, 0.5)
    assert q[-6:].tolist() == [2, 4, 4, 4, 4, 4] and q[:3].tolist() == [2, 2, 2]
