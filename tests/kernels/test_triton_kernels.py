"""The Triton kernels against float64: on a GPU, and in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported: one test runs this file again in a process of its own, where
``device`` is the CPU.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import selection
from support.devices import CUDA
from support.operator_arguments import arguments
from support.selection import each_once
from torch import Tensor

from kfconvert.kernels import reference
from kfconvert.ops import ACTIVATIONS
from kfconvert.ops.fused.act_mul import reference as act_mul
from kfconvert.ops.fused.layer_norm_act import reference as layer_norm_act
from kfconvert.ops.fused.rms_norm_act import reference as rms_norm_act

pytest.importorskip("triton")
kernels = importlib.import_module("kfconvert.kernels.triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCRIPTS = Path(__file__).parents[2] / "scripts"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GENERAL = {"act_mul": act_mul, "layer_norm_act": layer_norm_act, "rms_norm_act": rms_norm_act}
PAIRS = ["add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "add_mul_exp", "swish_multiply", "geglu", "mish_scale"]


@pytest.fixture(params=["cpu"] if INTERPRETED else [CUDA])
def device(request):
    return request.param


if not INTERPRETED:

    def test_in_the_interpreter():
        options = ["--exhaustive"] if selection.EXHAUSTIVE else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not cuda", *options, __file__]
        run = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout[-5000:]


def near(got, truth):
    """One rounding to a half type, which Triton's interpreter truncates to bfloat16; of float32 some more."""
    if isinstance(truth, tuple):
        return [near(*both) for both in zip(got, truth, strict=True)]
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    eps = torch.finfo(got.dtype).eps
    if got.dtype == torch.float32:
        rtol = 16 * eps
    else:
        rtol = 1.02 * eps if INTERPRETED and got.dtype == torch.bfloat16 else 0.52 * eps
    truth = torch.where(truth.abs() > torch.finfo(got.dtype).max, truth.sign() * torch.inf, truth)
    least = torch.finfo(got.dtype).tiny * eps  # where numbers are subnormal
    torch.testing.assert_close(got.double(), truth, rtol=rtol, atol=5e-7 * largest + least, equal_nan=True)


def widened(value):
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(name, *args, **kwargs):
    """The result of the Triton kernel, compared with the definition in float64."""
    got = getattr(kernels, name)(*args, **kwargs)
    truth = GENERAL.get(name) or getattr(reference, name)
    near(got, truth(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()}))
    first = args[0]
    assert all(y.dtype == first.dtype and y.device == first.device for y in (got if isinstance(got, tuple) else (got,)))
    return got


@pytest.fixture
def tensor(device):
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in kernels.__all__ if not name.endswith("int8")])
def test_every_operator(device, name, dtype):
    eps = {"eps": 1e-6} if name in ("rms_norm", "add_rms_norm", "rms_norm_gelu") else {}
    check(name, *arguments(name, device, dtype), **eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_benchmark_calls_them(device, monkeypatch, dtype):
    monkeypatch.syspath_prepend(SCRIPTS)
    cases = importlib.import_module("bench_ops_cases")
    compositions = importlib.import_module("bench_ops_compositions").COMPOSITIONS
    called = [case for case in (*cases.CASES, *compositions) if hasattr(kernels, case.operator)]
    assert len(called) > 20
    for case in called:
        inputs = case.inputs(cases.Maker(torch.device(device), dtype), 6, 48)
        got = case.of(kernels)(*inputs)
        if case.operator == "quantize_int8":
            assert torch.equal(got, case.plain(*inputs))
        else:
            near(got, case.plain(*map(widened, inputs)))


@pytest.mark.parametrize("shapes", [
    ((5, 7, 40), (5, 7, 40)), ((40,), (5, 7, 40)), ((6, 1), (1, 33)), ((2, 8, 4, 6), (8, 1, 1)), ((17,), ()), ((), ()),
    ((3, 5001), (3, 1)), ((0, 8), (8,)), ((4, 1), (4, 0)), ((1,), (1,)),
])  # fmt: skip
def test_pairs_that_broadcast(tensor, shapes):
    for name in PAIRS:
        check(name, *(tensor(*shape) for shape in shapes))


def test_layouts_of_pairs(tensor):
    image = tensor(2, 8, 6, 10)
    last = image.contiguous(memory_format=torch.channels_last)
    halves = tensor(6, 64).chunk(2, -1)
    turned = [half.t() for half in halves]
    for x, y in ((image, last), (last, image), (last, last), (last, image[:, :, :1]), halves, turned):
        assert check("mul_tanh", x, y).stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("name", PAIRS)
def test_special_values(device, name):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0, -2.0, 60000.0, -60000.0, 1e-30]
    for dtype in (torch.float32, torch.float16):
        x, y = torch.cartesian_prod(*[torch.tensor(special, device=device, dtype=dtype)] * 2).t().contiguous()
        want = getattr(reference, name)(x.double(), y.double()).to(dtype)
        torch.testing.assert_close(getattr(kernels, name)(x, y), want, equal_nan=True)


def test_activations(device):
    x = torch.linspace(-12, 12, 1001, device=device)
    one = torch.ones(1, device=device)
    for name in ACTIVATIONS:
        near(kernels.act_mul(x, one, name, 0.2), act_mul(x.double(), one.double(), name, 0.2))


def test_digits_of_tanh(device):
    """As many near 0 as elsewhere."""
    x = torch.logspace(-30, 1, 2001, device=device)
    for x in (x, -x):
        got = kernels.mul_tanh(x, torch.ones_like(x))
        torch.testing.assert_close(got.double(), x.double().tanh(), rtol=1e-6, atol=0)


@each_once(
    channels=[
        ((8,), 0), ((5, 16), -1), ((5, 16), 0), ((3, 5001), 0), ((3, 5001), 1), ((2, 8, 4, 6), 1), ((2, 7, 3, 5), 1),
        ((4, 1, 6), 1), ((0, 8), -1), ((4, 0), 1), ((2, 3, 0), 1),
    ],
    dtype=DTYPES,
)  # fmt: skip
def test_channels(tensor, channels, dtype):
    shape, dim = channels
    x, bias, weight = (tensor(*size, dtype=dtype) for size in (shape, (shape[dim],), (shape[dim],)))
    check("bias_silu", x, bias, dim)
    check("prelu_bias", x, weight, bias, dim=dim)
    check("prelu_bias", x, tensor(1, dtype=dtype), bias, dim)
    check("prelu_bias", x, tensor(dtype=dtype), bias, dim)


def test_layouts_with_channels(device, tensor):
    image, values = tensor(2, 8, 4, 6), tensor(16)[::2]
    for x in (image.contiguous(memory_format=torch.channels_last), image[:, :, ::2], image.transpose(2, 3)):
        for y in (
            check("bias_gelu", x, values, 1),
            check("prelu_bias", x, values, values, 1),
            kernels.quantize_int8(x, values.abs() + 0.1, 1, dim=1),
        ):
            assert y.stride() == torch.empty_like(x).stride()
        assert torch.equal(y, reference.quantize_int8(x, values.abs() + 0.1, 1, dim=1))
        back = kernels.dequantize_int8(y, values, 1, dim=1)
        assert torch.equal(back, reference.dequantize_int8(y, values, 1, dim=1)) and back.stride() == y.stride()


@each_once(cols=[1, 2, 33, 768, 1025, 5000], dtype=DTYPES)
def test_rows(tensor, dtype, cols):
    for rows in (1, 70 if cols < 100 else 3):
        x, residual = tensor(rows, cols, dtype=dtype), tensor(rows, cols, dtype=dtype)
        for weight, bias in ((tensor(cols), tensor(cols)), (tensor(cols, dtype=dtype), None), (None, None)):
            check("layer_norm_act", x, cols, weight, bias, 1e-5, "silu")
            check("layer_norm_act", x, (cols,), weight, bias, residual=residual, return_sum=True)
            check("rms_norm_act", x, cols, weight, 1e-6, "gelu_tanh", residual, offset=1.0)
            check("add_rms_norm", x, residual, cols, weight, eps=1e-5)
        check("softmax", x)


def test_norms_of_several_dimensions(tensor):
    x, weight, bias = tensor(2, 3, 4, 6), tensor(4, 6), tensor(4, 6)
    for residual in (tensor(2, 3, 4, 6), tensor(3, 4, 6), tensor(1, 3, 4, 6), tensor(4, 6), tensor(1, 1, 4, 6)):
        check("add_layer_norm", x, residual, (4, 6), weight, bias)
    check("layer_norm_relu", x.transpose(0, 1), (4, 6), weight, bias)
    check("layer_norm_act", x.transpose(2, 3), (6, 4), bias=bias.t())
    check("layer_norm_act", x[:, :0], (4, 6), weight, bias)
    y, s = kernels.layer_norm_act(x, 6, return_sum=True)
    assert s is x and y.shape == x.shape


def test_norms_far_from_zero(tensor):
    """The mean is rounded, by 6e-5 at 1000, but the variance is that of the deviations from it."""
    x = tensor(4, 999) + 1000
    got, want = kernels.layer_norm_act(x, 999), layer_norm_act(x.double(), 999)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)


def test_default_epsilon(device):
    x = torch.full((3, 8), 1e-4, device=device)
    near(kernels.rms_norm(x, 8), reference.rms_norm(x.double(), 8, eps=torch.finfo(torch.float32).eps))


def test_masks(device, tensor):
    x = tensor(2, 3, 4, 5)
    for shape in ((2, 3, 4, 5), (4, 5), (5,), (2, 1, 1, 5), (2, 1, 4, 1), (1, 1, 4, 5), (3, 1, 5), (1,), ()):
        additive = tensor(*shape)
        for mask in (additive, additive > -0.5):
            check("softmax", x, scale=-0.7, mask=mask)
            check("softmax", x[None], mask=mask)
            check("softmax", x, dim=1, mask=mask)
            check("softmax", x.transpose(1, 3).contiguous().transpose(1, 3), mask=mask)
    check("softmax", x.half(), scale=30.0, mask=tensor(4, 5, dtype=torch.float16))
    assert kernels.softmax(x, mask=torch.zeros(5, device=device, dtype=torch.bool)).isnan().all()
    check("softmax", x[0, 0, 0, 0])
    check("softmax", x[:0])
    check("softmax", torch.tensor([[1.0, -torch.inf], [torch.nan, 1], [torch.inf, 1]], device=device))


@each_once(
    channels=[((8,), 0), ((5, 16), -1), ((3, 5001), 0), ((2, 7, 3, 5), 1), ((0, 8), -1)],
    dtype=DTYPES,
)
def test_exact_integers(device, channels, dtype):
    shape, dim = channels
    x = torch.randn(shape, device=device).mul(2).to(dtype)
    scales = torch.rand(shape[dim], device=device) * 0.05 + 0.01
    points = torch.randint(-40, 40, (shape[dim],), device=device)
    one = torch.tensor(0.0371, device=device)
    for scale, zero_point in (
        (0.0371, 3), (one, points[:1]), (one.reshape(1), -7), (scales, points), (scales, 5), (0.03, points),
        (scales, 0.5), (0.02, one),
    ):  # fmt: skip
        q = kernels.quantize_int8(x, scale, zero_point, dim)
        assert q.dtype == torch.int8 and torch.equal(q, reference.quantize_int8(x, scale, zero_point, dim))
        back = kernels.dequantize_int8(q, scale, zero_point, dim, dtype=dtype)
        want = reference.dequantize_int8(q, scale, zero_point, dim, dtype=dtype)
        if INTERPRETED and dtype == torch.bfloat16:
            near(back, reference.dequantize_int8(q, widened(scale), zero_point, dim, dtype=torch.float64))
        else:
            assert torch.equal(back, want) and back.dtype == dtype


def test_half_way_cases_and_special_values(device):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e30, -1e30, float("inf"), -float("inf"), float("nan")])
    empty = kernels.quantize_int8(torch.ones(4, 0, device=device), torch.ones(0, device=device), 2)
    assert empty.shape == (4, 0) and empty.dtype == torch.int8
    assert kernels.quantize_int8(x.to(device), 1.0).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, 127, -128, 0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(tensor, interleaved):
    x = tensor(2, 7, 3, 12).transpose(1, 2)
    for shape in ((2, 3, 7, 12), (7, 12), (12,), (2, 1, 7, 12), (1, 3, 1, 12), (2, 1, 1, 12)):
        y = check("rope", x, tensor(*shape), tensor(*shape), interleaved)
        assert y.stride() == x.stride()
        check("rope", x.contiguous(), tensor(*shape), tensor(7, 12), interleaved)
    check("rope", tensor(12, 7).t(), tensor(7, 12), tensor(12), interleaved)
    check("rope", tensor(3, 2, dtype=torch.float16), *(tensor(2, dtype=torch.float16) for _ in "cs"), interleaved)
    check("rope", x[:0], tensor(7, 12), tensor(7, 12), interleaved)


def test_errors(device, tensor):
    x, y = tensor(4, 8), tensor(8)
    learned = tensor(8).requires_grad_()
    q = x.to(torch.int8)
    for call, match in (
        (lambda: kernels.add_relu(x, y[:3]), r"shapes \(4, 8\) and \(3,\) do not broadcast"),
        (lambda: kernels.add_relu(x, y.half()), "other has another dtype than x"),
        (lambda: kernels.geglu(x, learned), "forward only; kfconvert.ops has the backward"),
        (lambda: kernels.bias_gelu(x, learned), "forward only"),
        (lambda: kernels.prelu_bias(x, learned, y), "forward only"),
        (lambda: kernels.rms_norm(x, 8, learned), "forward only"),
        (lambda: kernels.add_layer_norm(x, learned, 8), "forward only"),
        (lambda: kernels.softmax(x, mask=learned), "forward only"),
        (lambda: kernels.rope(x, learned, y), "forward only"),
        (lambda: kernels.dequantize_int8(q, learned), "forward only"),
        (lambda: kernels.softmax(x.double()), "no float64"),
        (lambda: kernels.dequantize_int8(q, 0.1, dtype=torch.float64), "no float64"),
        (lambda: kernels.bias_relu(x, y, 2), r"dim 2 is out of range"),
        (lambda: kernels.layer_norm_act(x, 7), "normalized_shape does not fit"),
        (lambda: kernels.rms_norm(tensor(1, 131073), 131073), "rows of at most 131072 elements, not 131073"),
        (lambda: kernels.softmax(tensor(1, 131073)), "rows of at most 131072 elements, not 131073"),
        (lambda: kernels.softmax(x, mask=y[:3]), "does not broadcast"),
        (lambda: kernels.rope(x[:, :7], y[:7], y[:7]), "an even last dimension"),
        (lambda: kernels.quantize_int8(q, 0.1), "expected float64, float32, float16 or bfloat16"),
        (lambda: kernels.quantize_int8(x, y[:3]), r"scale has shape \(3,\)"),
        (lambda: kernels.dequantize_int8(x, 0.1), "expected int8"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    with pytest.raises(IndexError):
        kernels.softmax(x, 2)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        kernels.layer_norm_act(x, 8, activation="swish")
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="no autocast"):
        kernels.add_relu(x, x)
    with torch.no_grad():
        check("geglu", x, learned)


@pytest.mark.cuda
def test_the_longest_rows():
    x = torch.randn(3, 2**17, device="cuda")
    check("softmax", x)
    check("layer_norm_act", x, 2**17, x[0], x[1], residual=x, return_sum=True)


@pytest.mark.cuda
@pytest.mark.gpu_memory(24)
def test_more_elements_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    row = x[0].clone()
    for function in (
        lambda x: kernels.multiply_relu(x, x),
        lambda x: kernels.bias_relu(x, row),
        lambda x: kernels.rms_norm(x, 4096, row),
        lambda x: kernels.softmax(x),
        lambda x: kernels.rope(x, row, row),
        lambda x: kernels.quantize_int8(x, 0.02),
    ):
        result = function(x)
        for part in (slice(0, 2), slice(rows // 2, rows // 2 + 2), slice(rows - 2, rows)):
            assert torch.equal(result[part], function(x[part]))
        del result


@pytest.mark.cuda
def test_in_a_cuda_graph():
    x = torch.randn(64, 768, device="cuda")
    kernels.layer_norm_gelu(x, 768)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.layer_norm_gelu(x, 768)
    x.normal_()
    graph.replay()
    near(y, F.gelu(F.layer_norm(x.double(), (768,))))
