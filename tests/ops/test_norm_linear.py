"""norm_linear: a norm and the products of its result are as accurate as ATen's, by the kernel and by its
composition."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_replays_see_all_writes
from support.accuracy import assert_as_accurate

from kfconvert.ops import ACTIVATIONS
from kfconvert.ops.fused.norm_linear import RowNorm, norm_linear, takes_norm_linear

HALF_TYPES = [torch.float16, torch.bfloat16]
ROWS = (1, 3, 8, 9, 16)
# (out, in): one tile and less, several spans of the inputs, more tiles than blocks.
SIZES = [(16, 16), (24, 1008), (40, 80), (2304, 768), (9008, 64)]
EPS = 1e-5


def normalized(x, norm):
    if norm.centers:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, EPS)
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (norm.offset + norm.weight)


def plain(x, norm, weights, scales, bias, gated):
    y = normalized(x, norm)
    wide = [weight.to(x.dtype) for weight in weights]
    products = [F.linear(y, weight) for weight in wide]
    if scales:
        products = [product * scale.to(x.dtype).flatten() for product, scale in zip(products, scales)]
    y = torch.cat(products, -1) if bias is None else torch.cat(products, -1) + bias
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def rms(weight, offset=0.0):
    return RowNorm(weight, None, EPS, offset, False)


def check(x, residual, norm, weights, scales=(), bias=None, gated=False):
    code = ACTIVATIONS["silu" if gated else "none"].code
    y, total = norm_linear(x, residual, *norm, weights, scales, bias, code, 0.01, gated, True)
    assert y.is_contiguous() and y.dtype == x.dtype
    if residual is None:
        assert total.numel() == 0
    else:
        assert torch.equal(total, x + residual)
    given = x if residual is None else total  # a model rounds the sum, too
    wide = [weight.double() for weight in weights]
    of_norm = [each.double() if isinstance(each, torch.Tensor) else each for each in norm]
    exact = plain(given.double(), RowNorm(*of_norm), wide, scales, None if bias is None else bias.double(), gated)
    rough = plain(given, norm, weights, scales, bias, gated)
    assert_as_accurate(y, rough, exact, ulps=(2.0, 0.25))


def inputs(rows, columns, dtype, device):
    x, residual = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
    return x, residual if rows != 8 else None, torch.rand(columns, device=device, dtype=dtype) + 0.5


def weight_of(out, columns, dtype, device):
    return torch.randn(out, columns, device=device, dtype=dtype) / columns**0.5


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_and_sizes(dtype, gated, device):
    torch.manual_seed(0)
    for rows in ROWS if device == "cuda" else ROWS[:2]:
        for out, columns in SIZES if device == "cuda" else SIZES[:3]:
            x, residual, norm = inputs(rows, columns, dtype, device)
            weight = weight_of(2 * out if gated else out, columns, dtype, device)
            bias = torch.randn(weight.shape[0], device=device, dtype=dtype) if rows == 3 else None
            # A mean that is large beside the deviations needs a second pass over the row.
            shift = torch.randn_like(norm) if rows != 9 else None
            for given in (rms(norm, float(rows == 3)), RowNorm(norm, shift, EPS, 0.0, True)):
                is_held = (rows + 1 + (given.bias is not None)) * columns * 2 <= 32 << 10
                assert takes_norm_linear(x, given, (weight,), ()) == (device == "cuda" and is_held)
                if device == "cpu" or is_held:
                    check(x + 8 if given.centers else x, residual, given, (weight,), (), bias, gated)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_quantized_weights(dtype, device):
    torch.manual_seed(0)
    for numbers in (torch.int8, torch.float8_e4m3fn):
        x, residual, norm = inputs(2, 1024, dtype, device)
        sizes = (48, 32, 16)
        weights = [(40 * torch.randn(out, 1024, device=device)).clamp(-127, 127).to(numbers) for out in sizes]
        scales = [torch.rand(out, 1, device=device) / 1000 for out in sizes]
        check(x, residual, rms(norm), weights, scales)
        check(x, residual, rms(norm, 1.0), weights[:1] * 2, scales[:1] * 2, gated=True)
        check(x, residual, RowNorm(norm, norm / 2, EPS, 0.0, True), weights, scales)


def test_what_the_kernel_does_not_take(device):
    x, _, norm = inputs(2, 64, torch.float16, device)
    weight = weight_of(16, 64, torch.float16, device)
    few = device == "cuda"
    assert takes_norm_linear(x, rms(norm), (weight,), ()) == few
    assert takes_norm_linear(x.repeat(8, 1), rms(norm), (weight,), ()) == few
    assert not takes_norm_linear(x.repeat(9, 1), rms(norm), (weight,), ())
    assert not takes_norm_linear(x.float(), rms(norm), (weight,), ())
    assert not takes_norm_linear(x, rms(norm.float()), (weight,), ())
    # The kernel reads the weight of the norm before a copy of it would be written.
    assert not takes_norm_linear(x, rms(norm.repeat(2)[1:65]), (weight,), ())
    assert not takes_norm_linear(x, rms(norm.repeat_interleave(2)[::2]), (weight,), ())
    assert not takes_norm_linear(x, RowNorm(norm, norm.repeat(2)[1:65], EPS, 0.0, True), (weight,), ())
    assert not takes_norm_linear(x, RowNorm(None, None, EPS, 0.0, True), (weight,), ())
    assert not takes_norm_linear(x, rms(norm), (weight_of(64, 16, torch.float16, device).t(),), ())
    wide = torch.randn(4, 8192, device=device, dtype=torch.float16)
    assert not takes_norm_linear(wide, rms(wide[0]), (weight_of(8, 8192, torch.float16, device),), ())


def test_errors(device):
    x, residual, norm = inputs(2, 64, torch.float16, device)
    weight = weight_of(16, 64, torch.float16, device)
    for given, message in (
        ((x, residual, *rms(norm[:8]), [weight]), "norm"),
        ((x, residual, *RowNorm(norm, norm[:8], EPS, 0.0, True), [weight]), "norm"),
        ((x, residual[:1], *rms(norm), [weight]), "x and residual differ in shape"),
        ((x, residual, *rms(norm), [weight, weight]), "expected one weight"),
        ((x, residual, *rms(norm), [weight[:, :8]]), "does not fit weight"),
    ):
        with pytest.raises(RuntimeError, match=message):
            norm_linear(*given, [], None, 0, 0.0, False, True)


def test_torch_knows_it(device):
    x, residual, norm = inputs(2, 64, torch.float16, device)
    weight = weight_of(16, 64, torch.float16, device)
    given = x, residual, *rms(norm), [weight], [], None, 0, 0.0, False, True
    torch.library.opcheck(torch.ops.kfconvert.norm_linear.default, given)


@pytest.mark.cuda
def test_in_a_graph_every_kernel_sees_what_those_ahead_wrote():
    """In a chain of kernels that overlap, with weights and norms that change between replays."""
    torch.manual_seed(0)
    layers = [(*inputs(2, 1024, torch.bfloat16, "cuda")[:3:2], weight_of(1024, 1024, torch.bfloat16, "cuda"))
              for _ in range(24)]  # fmt: skip
    x = layers[0][0]

    def chain():
        y, s = x, x
        for _, norm, weight in layers:
            y, s = norm_linear(y, s, *rms(norm), [weight], [], None, 0, 0.0, False, True)
        return torch.cat([y, s])

    def change():
        x.normal_()
        for _, norm, weight in layers:
            weight.normal_().mul_(1 / 32)
            norm.uniform_(0.5, 1.5)

    assert_replays_see_all_writes(chain, change)
