"""quantized_linear: products of a few rows with int8 and float8 weights are as accurate as ATen's with wide weights."""

import pytest
import torch
import torch.nn.functional as F
from support.accuracy import assert_as_accurate

from kfconvert.ops import ACTIVATIONS
from kfconvert.ops.fused.quantized_linear import NUMBERS, quantized_linear, takes_few_rows

HALF_TYPES = [torch.float16, torch.bfloat16]
ROWS = (1, 3, 8, 9, 16, 17, 64)
SCALES = torch.float32, torch.bfloat16
# (out, in): one tile and less, several spans of the inputs, more tiles than blocks.
SIZES = [(16, 16), (24, 1008), (7, 80), (2304, 768), (264, 5632), (9008, 64)]


def layer(out, columns, numbers, device, scale_dtype=torch.float32):
    if numbers == torch.int8:
        weight = torch.randint(-128, 128, (out, columns), device=device, dtype=torch.int8)
    else:
        weight = torch.randn(out, columns, device=device).to(numbers)
    scale = torch.rand(out, 1, device=device).to(scale_dtype) / (100 if numbers == torch.int8 else 1) / columns**0.5
    return weight, scale


def run(x, layers, activation="none", gated=False):
    weights, scales = zip(*layers)
    return quantized_linear(x, weights, scales, ACTIVATIONS[activation].code, 0.01, gated)


def plain(x, layers, activation="none", gated=False):
    """With the weights in the dtype of x."""
    products = [F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype).flatten() for weight, scale in layers]
    act = ACTIVATIONS[activation].reference
    return act(products[0], 0.01) * products[1] if gated else act(torch.cat(products, -1), 0.01)


def check(x, *layers, **options):
    y = run(x, layers, **options)
    assert y.is_contiguous() and y.dtype == x.dtype
    assert_as_accurate(y, plain(x, layers, **options), plain(x.double(), layers, **options), ulps=(2.0, 0.25))


def rows_of(count, columns, dtype, device):
    return torch.randn(count, columns, device=device, dtype=dtype)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_rows_and_sizes(dtype, numbers, device):
    torch.manual_seed(0)
    for rows in ROWS if device == "cuda" else (3,):
        for out, columns in SIZES if device == "cuda" else SIZES[:3]:
            x, given = rows_of(rows, columns, dtype, device), layer(out, columns, numbers, device, SCALES[rows % 2])
            assert takes_few_rows(x, given[0]) == (device == "cuda")
            check(x, given)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("features", [(40, 8, 8), (7, 24), (2304, 17, 3)])
def test_several_weights(numbers, features, device):
    torch.manual_seed(0)
    for rows in (1, 9, 40):
        layers = [layer(out, 96, numbers, device, torch.bfloat16) for out in features]
        check(rows_of(rows, 96, torch.bfloat16, device), *layers)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("features", [5, 40, 2305])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(numbers, features, activation, device):
    torch.manual_seed(0)
    for rows in (1, 9, 40):
        layers = [layer(features, 96, numbers, device) for _ in range(2)]
        check(rows_of(rows, 96, torch.float16, device), *layers, activation=activation, gated=True)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_every_number_is_exact(dtype, numbers, device):
    """By products with rows of the identity. NaN is the one number that the kernel does not convert."""
    weight = torch.arange(256, dtype=torch.uint8, device=device).view(numbers).view(16, 16)
    expected = weight.to(dtype).nan_to_num(0)
    y = run(torch.eye(16, dtype=dtype, device=device), [(expected.to(numbers), torch.ones(16, device=device))])
    assert torch.equal(y, expected.t())


def test_layouts(device):
    torch.manual_seed(0)
    x, (weight, scale) = rows_of(4, 64, torch.bfloat16, device), layer(48, 64, torch.int8, device)
    check(x.view(2, 1, 2, 64), (weight, scale.flatten()))
    check(x.t().contiguous().t(), (weight, scale))
    check(torch.cat([x.flatten()[:1], x.flatten()])[1:].view(4, 64), (weight, scale))
    check(x, (weight, scale.repeat(1, 2)[:, :1]))


def test_errors(device):
    x, given = rows_of(4, 64, torch.bfloat16, device), layer(48, 64, torch.int8, device)
    weight, scale = given
    for wrong in ([(weight[:, :32], scale)], [(weight, scale[:3])]):
        with pytest.raises(RuntimeError, match="kfconvert::quantized_linear: .*do not fit"):
            run(x, wrong)
    for layers, gated in (([], False), ([given] * 4, False), ([given], True), ([given] * 3, True)):
        with pytest.raises((RuntimeError, ValueError), match="expected 1 to 3 weights|not enough values"):
            run(x, layers, gated=gated)
    with pytest.raises(RuntimeError, match="a gate and its factor have the same features"):
        run(x, [given, (weight[:32], scale[:32])], gated=True)


@pytest.mark.cuda
def test_what_the_kernel_does_not_take():
    x, given = rows_of(65, 64, torch.bfloat16, "cuda"), layer(48, 64, torch.int8, "cuda")
    weight, scale = given
    for rows in (x, x[:0], x[:4].float()):
        assert not takes_few_rows(rows, weight)
        with pytest.raises(RuntimeError, match="kfconvert::quantized_linear: the kernel takes 1 to 64 rows"):
            run(rows, [given])
    shifted = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(48, 64)
    for other in (weight.t().contiguous().t(), shifted, torch.cat([weight, weight], 1)[:, ::2]):
        assert not takes_few_rows(x[:4], other)
        with pytest.raises(RuntimeError, match="the kernel takes contiguous, aligned weights"):
            run(x[:4], [(other, scale)])
    with pytest.raises(RuntimeError, match="weight is neither int8 nor float8_e4m3fn"):
        run(x[:4], [(given[0].short(), given[1])])
    with pytest.raises(RuntimeError, match="differ in dtype"):
        run(x[:4], [given, (given[0], given[1].half())])


def test_torch_knows_it(device):
    x, (weight, scale) = rows_of(4, 64, torch.bfloat16, device), layer(48, 64, torch.int8, device)
    given = x, [weight, weight], [scale, scale], ACTIVATIONS["silu"].code, 0.01
    for gated in (False, True):
        torch.library.opcheck(torch.ops.kfconvert.quantized_linear.default, (*given, gated))
