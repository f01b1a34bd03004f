"""quantized_linear: products of a few rows with int8 and float8 weights are as accurate as ATen's with wide weights."""

import pytest
import torch
import torch.nn.functional as F
from support.accuracy import assert_as_accurate

from kfconvert.ops.fused.quantized_linear import NUMBERS, quantized_linear, takes_few_rows

HALF_TYPES = [torch.float16, torch.bfloat16]
ROWS = (1, 3, 8, 9, 16)
# (out, in): one tile and less, several spans of the inputs, more tiles than blocks.
SIZES = [(16, 16), (24, 1008), (7, 80), (2304, 768), (264, 5632), (9008, 64)]


def inputs(rows, out, columns, numbers, dtype, device, scale_dtype=torch.float32):
    if numbers == torch.int8:
        weight = torch.randint(-128, 128, (out, columns), device=device, dtype=torch.int8)
    else:
        weight = torch.randn(out, columns, device=device).to(numbers)
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    scale = torch.rand(out, 1, device=device).to(scale_dtype) / (100 if numbers == torch.int8 else 1) / columns**0.5
    return x, weight, scale


def check(x, weight, scale):
    y = quantized_linear(x, weight, scale)
    wide = F.linear(x.double(), weight.double()) * scale.double().flatten()
    plain = F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype).flatten()
    assert y.is_contiguous() and y.dtype == x.dtype
    assert_as_accurate(y, plain, wide, ulps=(2.0, 0.25))


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_rows_and_sizes(dtype, numbers, device):
    torch.manual_seed(0)
    for rows in ROWS if device == "cuda" else (3,):
        for out, columns in SIZES if device == "cuda" else SIZES[:3]:
            given = inputs(rows, out, columns, numbers, dtype, device, dtype if rows == 3 else torch.float32)
            assert takes_few_rows(*given[:2]) == (device == "cuda")
            check(*given)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_every_number_is_exact(dtype, numbers, device):
    """By products with rows of the identity. NaN is the one number that the kernel does not convert."""
    weight = torch.arange(256, dtype=torch.uint8, device=device).view(numbers).view(16, 16)
    expected = weight.to(dtype).nan_to_num(0)
    y = quantized_linear(torch.eye(16, dtype=dtype, device=device), expected.to(numbers), torch.ones(16, device=device))
    assert torch.equal(y, expected.t())


def test_layouts(device):
    torch.manual_seed(0)
    x, weight, scale = inputs(4, 48, 64, torch.int8, torch.bfloat16, device)
    check(x.view(2, 1, 2, 64), weight, scale.flatten())
    check(x.t().contiguous().t(), weight, scale)
    check(torch.cat([x.flatten()[:1], x.flatten()])[1:].view(4, 64), weight, scale)
    check(x, weight.t().contiguous().t(), scale)
    check(x, torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(48, 64), scale)
    check(x, torch.cat([weight, weight], 1)[:, ::2], scale)
    check(x, weight, scale.repeat(1, 2)[:, :1])


def test_errors(device):
    x, weight, scale = inputs(4, 48, 64, torch.int8, torch.bfloat16, device)
    for given in ((x[:, :32], weight, scale), (x, weight, scale[:3])):
        with pytest.raises(RuntimeError, match="kfconvert::quantized_linear: .*do not fit"):
            quantized_linear(*given)


@pytest.mark.cuda
def test_what_the_kernel_does_not_take():
    x, weight, scale = inputs(17, 48, 64, torch.int8, torch.bfloat16, "cuda")
    for given in (x, x[:0], x[:4].float()):
        assert not takes_few_rows(given, weight)
        with pytest.raises(RuntimeError, match="kfconvert::quantized_linear: the kernel takes 1 to 16 rows"):
            quantized_linear(given, weight, scale)
    with pytest.raises(RuntimeError, match="weight is neither int8 nor float8_e4m3fn"):
        quantized_linear(x[:4], weight.short(), scale)


def test_torch_knows_it(device):
    torch.library.opcheck(
        torch.ops.kfconvert.quantized_linear.default, inputs(4, 48, 64, torch.int8, torch.bfloat16, device)
    )
