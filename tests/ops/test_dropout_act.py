"""Dropout without a mask: what is dropped follows from the seed, and everything else is as in plain ATen."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_operator
from support.accuracy import assert_as_accurate
from support.operator_samples import CHANNELS

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.standalone.dropout_act import _philox, keep_mask

OPERATORS = torch.ops.kfconvert
GELU, NONE = ops.ACTIVATIONS["gelu"].code, ops.ACTIVATIONS["none"].code
SHAPES = [(8,), (5, 8), (3, 70_001), (2, 8, 4, 6), (2, 7, 3, 5), (), (0, 8), (100_003,)]


def inputs(shape, dtype, device, dim=-1):
    channels = shape[dim] if shape else 1
    return [torch.randn(s, device=device).to(dtype) for s in (shape, (channels,), shape)]


def test_known_answers_of_philox():
    """From the Random123 distribution (Salmon et al.): counter and key all zeros, all ones, and digits of pi."""
    zeros = _philox(0, 0, torch.tensor([0]))
    assert zeros.tolist() == [[0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]]
    ones = _philox(torch.tensor(-1), torch.tensor(-1), torch.tensor([-1]))
    assert ones.tolist() == [[0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]]
    pi = _philox(0x299F31D0A4093822, 0x0370734413198A2E, torch.tensor([0x85A308D3243F6A88 - 2**64]))
    assert pi.tolist() == [[0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_drops_the_same_elements_everywhere(device, shape, dtype):
    x, bias, residual = inputs(shape, dtype, device)
    numbers = -(2**62) - 12345, 2**40 + 7
    states = (None, *numbers), (torch.tensor(numbers, device=device), 0, 0)
    for p in (0.0, 0.1, 0.5, 0.999):
        keep = keep_mask(x, None, *numbers, p)
        assert torch.equal(keep.cpu(), keep_mask(x.cpu(), torch.tensor(numbers), 0, 0, p))
        for code, added, state in ((GELU, None, states[0]), (NONE, residual, states[1])):
            use = bias if shape else None
            y = OPERATORS.dropout_act(x, use, added, *state, p, code, 0.01, -1)
            v = x.double() if use is None else x.double() + bias.double()
            v = F.gelu(v) if code == GELU else v
            truth = torch.where(keep, v / (1 - p), 0) + (0 if added is None else added.double())
            assert_as_accurate(y, truth.to(dtype), truth, slack=torch.finfo(dtype).eps)  # the product with 1 / (1 - p)


def test_a_negative_zero_stays_one(device):
    y = OPERATORS.dropout_act(torch.full((4096,), -0.0, device=device), None, None, None, 5, 0, 0.0, NONE, 0.01, -1)
    assert y.signbit().all()


@pytest.mark.parametrize("layout", ["channels_last", "strided"])
def test_layouts(device, layout):
    x, bias, residual = inputs((2, 8, 4, 6), torch.float32, device, 1)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x[:, :, ::2]
    residual = residual[:, :, : x.shape[2]]
    y = OPERATORS.dropout_act(x, bias, residual, None, 5, 0, 0.3, NONE, 0.01, 1)
    keep = keep_mask(torch.empty_like(x), None, 5, 0, 0.3)
    torch.testing.assert_close(y, torch.where(keep, (x + bias[:, None, None]) / 0.7, 0) + residual)
    assert y.stride() == torch.empty_like(x).stride()


def test_about_as_many_are_dropped_as_asked_for(device, compiled):
    x = torch.ones(1000, 1000, device=device)
    for p in (0.1, 0.5, 0.9):
        y = ops.bias_dropout_add(x, None, torch.zeros_like(x), p)
        kept = y != 0
        # Five standard deviations of a binomial share.
        assert abs(kept.float().mean().item() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
        torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
        # Neighbours are dropped independently of each other.
        both = (kept[:, 1:] & kept[:, :-1]).float().mean().item()
        assert abs(both - (1 - p) ** 2) < 0.005


def test_the_seed_is_drawn_from_torch(device, compiled):
    x = torch.randn(64, 100, device=device)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append([ops.gelu_dropout(x, 0.5) for _ in "ab"])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][0], draws[2][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_dropping(device, compiled, dtype):
    x, bias, residual = inputs((5, 8), dtype, device)
    for options in ({"training": False}, {"p": 0.0}):
        check_operator(ops.gelu_dropout, reference.gelu_dropout, x, **options)
        check_operator(ops.bias_dropout_add, reference.bias_dropout_add, x, bias, residual, **options)
    assert torch.equal(ops.bias_dropout_add(x, bias, residual, p=1.0), residual)
    assert torch.equal(ops.gelu_dropout(x, p=1.0), torch.zeros_like(x))


def test_gradients(device, compiled):
    x, bias, residual = (t.requires_grad_() for t in inputs((30, 40), torch.float64, device))
    for function, leaves in (
        (lambda: ops.gelu_dropout(x, 0.4), (x,)),
        (lambda: ops.bias_dropout_add(x, bias, residual, 0.4), (x, bias, residual)),
    ):
        torch.manual_seed(3)
        y = function()
        grad = torch.randn_like(y)
        grads = torch.autograd.grad(y, leaves, grad)
        kept = (y if len(leaves) == 1 else y - residual) != 0
        exact = F.gelu(x) if len(leaves) == 1 else x + bias
        exact = torch.where(kept, exact / 0.6, 0) + (0 if len(leaves) == 1 else residual)
        for got, want in zip(grads, torch.autograd.grad(exact, leaves, grad)):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_backward_kernel(device, dtype):
    x, bias, grad = inputs((6, 33), dtype, device)
    for code in (NONE, GELU, ops.ACTIVATIONS["tanh"].code):
        got = OPERATORS.dropout_act_backward(grad, x, bias, None, 9, 4, 0.25, code, 0.01, -1)
        v = (x.double() + bias.double()).requires_grad_()
        act = next(a for a in ops.ACTIVATIONS.values() if a.code == code)
        y = torch.where(keep_mask(x, None, 9, 4, 0.25), act.reference(v, 0.01) / 0.75, 0)
        (truth,) = torch.autograd.grad(y, v, grad.double())
        assert_as_accurate(got, truth.to(dtype), truth)


@pytest.mark.cuda
def test_a_graph_drops_other_elements_at_each_replay():
    x = torch.randn(64, 256, device="cuda")
    ops.gelu_dropout(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.gelu_dropout(x, 0.5)
    replays = []
    for _ in range(2):
        torch.cuda.manual_seed(7)
        for _ in range(2):
            graph.replay()
            replays.append(y.clone())
    assert not torch.equal(replays[0], replays[1])
    assert torch.equal(replays[0], replays[2]) and torch.equal(replays[1], replays[3])


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
def test_more_elements_than_32_bits_count():
    x = torch.ones(2**31 + 4096, device="cuda", dtype=torch.float16)
    y = ops.bias_dropout_add(x, None, torch.zeros_like(x), 0.5)
    assert not torch.equal(y[:4096], y[-4096:])
    assert abs((y[-(2**20) :] != 0).float().mean().item() - 0.5) < 0.005


@pytest.mark.parametrize(("shape", "dim"), CHANNELS)
def test_the_gradient_of_the_bias_sums_that_of_x(device, compiled, shape, dim):
    for dtype in (torch.float64, torch.bfloat16):
        x, bias, _ = inputs(shape, dtype, device, dim)
        leaves = [t.requires_grad_() for t in (x, bias)]
        y = ops.bias_dropout_add(*leaves, torch.zeros_like(x), 0.4, dim=dim)
        of_x, of_bias = torch.autograd.grad(y, leaves, torch.randn_like(x))
        others = [d for d in range(x.dim()) if d != dim % x.dim()]
        want = of_x.double().sum(others) if others else of_x.double()
        rounding = torch.finfo(dtype).eps * max(1, x.numel() ** 0.5)
        torch.testing.assert_close(of_bias.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=8 * rounding)
        if x.numel() > 1000:
            assert 0.2 < (of_x == 0).double().mean() < 0.6
