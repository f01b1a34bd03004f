"""skinny_linear: products of a few rows, by the kernel and by what stands in for it, are as accurate as ATen's."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_replays_see_all_writes
from support.accuracy import assert_as_accurate

from kfconvert import ops
from kfconvert.ops import ACTIVATIONS
from kfconvert.ops.fused.skinny_linear import skinny_linear, takes_skinny

HALF_TYPES = [torch.float16, torch.bfloat16]
ROWS = (1, 3, 8, 9, 16)
# (out, in): one tile and less, several spans of the inputs, more tiles than blocks, columns in both widths.
SIZES = [(16, 8), (24, 1000), (40, 72), (2304, 768), (264, 5632), (9008, 64)]


def inputs(rows, out, columns, dtype, device, transposed=False, gated=False, bias=True):
    features = out * (2 if gated else 1)
    weight = torch.randn(features, columns, device=device, dtype=dtype) / columns**0.5
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    b = torch.randn(features, device=device, dtype=dtype) if bias else None
    return x, weight.t().contiguous().t() if transposed else weight, b


def combined(rows, sizes, device):
    """The product, which only the kernel needs."""
    return itertools.product(rows, sizes) if device == "cuda" else zip(itertools.cycle(rows), sizes)


def plain(x, weight, bias, activation="none", slope=0.01, gated=False, gate_first=True):
    act, y = ACTIVATIONS[activation].reference, F.linear(x, weight, bias)
    if not gated:
        return act(y, slope)
    gate, up = y.chunk(2, -1) if gate_first else y.chunk(2, -1)[::-1]
    return act(gate, slope) * up


def check(x, weight, bias, activation="none", slope=0.01, gated=False, gate_first=True):
    y = skinny_linear(x, weight, bias, ACTIVATIONS[activation].code, slope, gated, gate_first)
    options = activation, slope, gated, gate_first
    wide = plain(x.double(), weight.double(), None if bias is None else bias.double(), *options)
    assert y.is_contiguous()
    assert_as_accurate(y, plain(x, weight, bias, *options), wide, ulps=(2.0, 0.25))


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_and_sizes(dtype, transposed, device):
    torch.manual_seed(0)
    for rows, (out, columns) in combined(ROWS, SIZES, device):
        given = inputs(rows, out, columns, dtype, device, transposed, bias=rows != 3)
        assert takes_skinny(given[0], columns) == (device == "cuda")
        check(*given)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated(dtype, gate_first, device):
    torch.manual_seed(0)
    for rows, (out, columns) in combined(ROWS, [*SIZES, (5, 64), (13, 80)], device):
        given = inputs(rows, out, columns, dtype, device, gated=True, bias=rows != 3)
        check(*given, "silu", 0.01, True, gate_first)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    torch.manual_seed(0)
    given = inputs(4, 48, 64, torch.float16, device)
    check(*given, activation, 0.2)
    check(*given, activation, 0.2, gated=True)


def test_what_the_kernel_does_not_take(device):
    torch.manual_seed(0)
    x, weight, bias = inputs(4, 48, 64, torch.float16, device)
    check(*inputs(17, 48, 64, torch.float16, device))
    check(*inputs(4, 48, 64, torch.float32, device), gated=True)
    check(*inputs(4, 48, 60, torch.float16, device))
    check(*inputs(4, 49, 64, torch.float16, device, transposed=True))
    check(*inputs(4, 48, 64, torch.float16, device, transposed=True, gated=True), gated=True)
    check(torch.randn(4 * 64 + 1, device=device, dtype=torch.float16)[1:].view(4, 64), weight, bias)
    check(x.t().contiguous().t(), weight, bias)
    check(x, torch.randn(48 * 64 + 1, device=device, dtype=torch.float16)[1:].view(48, 64) / 8, bias)
    check(x, torch.cat([weight, weight], 1)[:, ::2], bias)
    check(x, weight, bias.repeat_interleave(2)[::2])
    check(x.view(2, 1, 2, 64), weight, bias)
    for nothing in (x[:0], x[:, :0]):
        assert skinny_linear(nothing, weight[:, : nothing.shape[1]], bias, 0, 0.0, False, True).shape[1] == 48


def test_a_row_does_not_spoil_its_neighbours(device):
    torch.manual_seed(0)
    for transposed in (False, True):
        x, weight, bias = inputs(3, 48, 64, torch.float16, device, transposed)
        expected = skinny_linear(x, weight, bias, 0, 0.0, False, True)
        x[1] = torch.nan
        y = skinny_linear(x, weight, bias, 0, 0.0, False, True)
        assert y[1].isnan().all() and torch.equal(y[::2], expected[::2])


def test_errors(device):
    x, weight, bias = inputs(4, 47, 64, torch.float16, device)
    for given, message in (
        ((x[:, :8], weight, bias), "does not fit weight"),
        ((x, weight.float(), bias), "weight"),
        ((x, weight, bias[:3]), "bias has shape"),
    ):
        with pytest.raises(RuntimeError, match=f"kfconvert::skinny_linear: .*{message}"):
            skinny_linear(*given, 0, 0.0, False, True)
    with pytest.raises(RuntimeError, match="an even number of features, not 47"):
        skinny_linear(x, weight, bias, 0, 0.0, True, True)


def test_torch_knows_it(device):
    given = inputs(4, 48, 64, torch.float16, device)
    torch.library.opcheck(torch.ops.kfconvert.skinny_linear.default, (*given, 2, 0.01, True, False))


@pytest.mark.cuda
@pytest.mark.parametrize("transposed", [False, True])
def test_in_a_graph_every_kernel_sees_what_those_ahead_wrote(transposed):
    """In a chain of kernels that overlap, with weights that change between replays."""
    torch.manual_seed(0)
    layers = [inputs(2, 1024, 1024, torch.float16, "cuda", transposed) for _ in range(24)]
    x = layers[0][0]

    def chain():
        y = x
        for _, weight, bias in layers:
            y = skinny_linear(ops.layer_norm_act(y, (1024,), activation="none"), weight, bias, 0, 0.0, False, True)
        return y

    def change():
        x.normal_()
        for _, weight, bias in layers:
            weight.normal_().mul_(1 / 32)
            bias.normal_()

    assert_replays_see_all_writes(chain, change)
