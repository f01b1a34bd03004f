"""quantize_int8 gives exactly the integers of its definition, dequantize_int8 its numbers."""

import torch

from kfconvert import ops
from kfconvert.kernels import reference


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


def test_a_scale_is_learned(device):
    q = torch.randint(-128, 128, (3, 8), device=device).to(torch.int8)
    scale = torch.rand(8, device=device, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ops.dequantize_int8(q, s, 3, dtype=torch.float64), (scale,))
