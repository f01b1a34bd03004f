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
from support.accuracy import assert_as_accurate
from support.devices import CUDA, without_onednn
from support.operator_samples import LAYOUTS, SAMPLES
from torch import Tensor

import kfconvert
from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.modules import FusedAttention, MaskTerm
from kfconvert.ops import ACTIVATIONS

pytest.importorskip("triton")
kernels = importlib.import_module("kfconvert.kernels.triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCRIPTS = Path(__file__).parents[2] / "scripts"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One name for each kernel.
KERNELS = {"act_mul", "add_relu", "layer_norm_act", "linear_act", "multiply_relu", "rms_norm_act"}
# Into what FusedAttention splits the first dimension, and the shapes of q, k, v and its terms.
ATTENTIONS = {
    "windows": (2, (4, 3, 49, 32), (4, 3, 49, 32), (4, 3, 49, 32), (1, 3, 49, 49), (1, 2, 1, 49, 49)),
    "windows and grids": (None, (1, 2, 3, 49, 16), (1, 2, 3, 49, 16), (1, 2, 3, 49, 16), (2, 1, 49, 49)),
    "heads first": (3, (6, 17, 20), (6, 5, 20), (6, 5, 24), (1, 17, 5), (2, 1, 17, 5)),
    "values with heads": (3, (6, 17, 20), (6, 5, 20), (2, 3, 5, 24), (17, 1)),
    "one head of keys": (None, (2, 3, 70, 16), (1, 1, 200, 16), (2, 1, 200, 16), (2, 1, 70, 200)),
    "three dimensions": (None, (3, 20, 16), (1, 64, 16), (3, 64, 16), (20, 64)),
}
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


else:

    def test_the_example_saves_and_loads(tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(SCRIPTS.parent / "examples")
        example = importlib.import_module("own_pattern_triton")
        for shape in ((3, 8), (1025,), (2, 3, 4, 5)):
            x = torch.randn(shape)
            torch.testing.assert_close(example.swish_triton(x), example.swish(x))
        kfconvert.register_pattern(example.swish, example.swish_triton, torch.randn(2, 4), name="own_swish")
        converter = kfconvert.ModelConverter(select="all")
        fused = converter.convert_model(example.Net(8, 8).eval(), example_inputs=torch.randn(3, 8))
        assert converter.conversion_stats["own_swish_replaced"] == 1
        kfconvert.save(fused, tmp_path)
        with pytest.raises(kfconvert.ArtifactError, match="own_pattern_triton:swish_triton"):
            kfconvert.load(tmp_path, model=example.Net(8, 8))
        kfconvert.load(tmp_path, model=example.Net(8, 8), trust_source=True)
        kfconvert.unregister_pattern("own_swish")


def near(got, truth, summands=0.0):
    """One rounding to a half type, which Triton's interpreter truncates to bfloat16; of float32 some more."""
    if isinstance(truth, tuple):
        return [near(*both) for both in zip(got, truth, strict=True)]
    finite = truth[truth.isfinite()]
    # The errors of summands, which are of this size together, stay where they cancel.
    largest = max(summands, finite.abs().max().item() if finite.numel() else 0.0)
    eps = torch.finfo(got.dtype).eps
    rtol = {torch.float32: 16, torch.bfloat16: 1.02 if INTERPRETED else 0.52}.get(got.dtype, 0.52) * eps
    truth = torch.where(truth.abs() > torch.finfo(got.dtype).max, truth.sign() * torch.inf, truth)
    least = torch.finfo(got.dtype).tiny * eps  # where numbers are subnormal
    torch.testing.assert_close(got.double(), truth, rtol=rtol, atol=5e-7 * largest + least, equal_nan=True)


def widened(value):
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(name, *args, **kwargs):
    """The result of the Triton kernel, compared with the definition in float64."""
    got = getattr(kernels, name)(*args, **kwargs)
    truth = getattr(reference, name)
    near(got, truth(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()}))
    first = args[0]
    assert all(y.dtype == first.dtype and y.device == first.device for y in (got if isinstance(got, tuple) else (got,)))
    return got


def is_scaled_apart(name, given):
    """Whether this call of ``mish_scale`` multiplies a half type by a number: a separate pass, which rounds again."""
    return name == "mish_scale" and not isinstance(given.args[1], Tensor) and given.args[0].element_size() == 2


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_operator(device, name):
    """All samples without gradients, in a dtype and layout of each."""
    operator, definition = getattr(kernels, name), getattr(reference, name)
    most = 1500 if INTERPRETED else 10**9
    samples = SAMPLES[name] if name in KERNELS or not INTERPRETED else SAMPLES[name][:2]
    for number, sample in enumerate(samples):
        layout = LAYOUTS[number % len(LAYOUTS)]
        given = sample.made(DTYPES[number % 3], device, layout)
        tensors = [x for x in (*given.args, *given.kwargs.values()) if isinstance(x, Tensor)]
        if sum(x.numel() for x in tensors) > most or any(x.shape[-1:] > (2**17,) for x in tensors):
            continue
        wide = given.in_float64()
        outputs, truth, summands = given.run(operator), wide.run(definition), 0.0
        if name == "linear_act":
            summands = max(F.linear(*wide.mapped(torch.abs).args[:3]).flatten().tolist(), default=0.0)
        for y, exact in zip(outputs, truth, strict=True):
            assert y.device.type == device and y.shape == exact.shape
            if not is_scaled_apart(name, given):
                near(y, exact.to(device), summands)
        if is_scaled_apart(name, given):
            x, scale = given.args
            assert torch.equal(outputs[0], F.mish(x) * scale)
        if name in PAIRS:  # the layout of the result is that of kfconvert.ops
            assert [y.stride() for y in outputs] == [y.stride() for y in given.run(getattr(ops, name))]


@pytest.fixture
def tensor(device):
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_benchmark_calls_them(device, monkeypatch, dtype):
    monkeypatch.syspath_prepend(SCRIPTS)
    cases = importlib.import_module("bench_ops_cases")
    compositions = importlib.import_module("bench_ops_compositions").COMPOSITIONS
    called = [case for case in (*cases.CASES, *compositions) if hasattr(kernels, case.operator)]
    assert len(called) > 10
    for case in called:
        inputs = case.inputs(cases.Maker(torch.device(device), dtype), 6, 48)
        near(case.of(kernels)(*inputs), case.plain(*map(widened, inputs)))


@pytest.mark.parametrize("name", PAIRS)
def test_special_values(device, name):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0, -2.0, 60000.0, -60000.0, 1e-30]
    for dtype in (torch.float32, torch.float16):
        x, y = torch.cartesian_prod(*[torch.tensor(special, device=device, dtype=dtype)] * 2).t().contiguous()
        want = getattr(reference, name)(x.double(), y.double()).to(dtype)
        torch.testing.assert_close(getattr(kernels, name)(x, y), want, equal_nan=True)


def test_infinite_and_largest_factors(tensor):
    """Their parts on tensor cores are NaN: the product of these tiles is computed without."""
    x, weight = tensor(5, 33), tensor(9, 33) / 1000
    x[1, 2], x[2, 3], x[3, 4], weight[3] = torch.inf, torch.finfo(x.dtype).min, torch.nan, 0
    for y, row in zip(kernels.linear_act(x, weight), x, strict=True):
        near(y, F.linear(row.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tiles_of_half_types(tensor, monkeypatch, dtype):
    """With incomplete ones at the ends, of rows of wider matrices."""
    linear = importlib.import_module("kfconvert.kernels.triton.linear")
    monkeypatch.setattr(linear, "TMA_TILES", 0)
    x, weight = tensor(300, 80, dtype=dtype)[:, :72], tensor(520, 88, dtype=dtype)[:, :72]
    assert linear.takes(x, weight) or not INTERPRETED
    for bias in (tensor(520, dtype=dtype), None):
        check("linear_act", x, weight, bias, "gelu")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ATTENTIONS)
@without_onednn()
def test_attention(tensor, name, dtype):
    """Rows without visible keys are NaN, also behind a boolean term."""
    split, *shapes = ATTENTIONS[name]
    q, k, v, *terms = (tensor(*shape, dtype=dtype) for shape in shapes)
    terms[-1][..., 4, :], terms[-1][..., 9, 2:] = -torch.inf, -torch.inf
    kinds = (*(MaskTerm() for _ in terms), MaskTerm(-torch.inf))
    module = FusedAttention(0.3, split is None, kinds, split)
    inputs = q, k.mT if split is None else k, v, *terms, terms[-1] > 1
    exact = module.reference(*map(widened, inputs))
    assert exact[..., 4, :].isnan().all() and exact.isfinite().any()
    assert_as_accurate(module._triton(*inputs), module.reference(*inputs), exact, ulps=2)


def test_activations(device):
    x = torch.linspace(-12, 12, 1001, device=device)
    one = torch.ones(1, device=device)
    for name in ACTIVATIONS:
        near(kernels.act_mul(x, one, name, 0.2), reference.act_mul(x.double(), one.double(), name, 0.2))


def test_digits_of_tanh(device):
    """As many near 0 as elsewhere."""
    x = torch.logspace(-30, 1, 2001, device=device)
    for x in (x, -x):
        got = kernels.mul_tanh(x, torch.ones_like(x))
        torch.testing.assert_close(got.double(), x.double().tanh(), rtol=1e-6, atol=0)


def test_norms_far_from_zero(tensor):
    """The mean is rounded, by 6e-5 at 1000, but the variance is that of the deviations from it."""
    x = tensor(4, 999) + 1000
    got, want = kernels.layer_norm_act(x, 999), reference.layer_norm_act(x.double(), 999)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)


def test_default_epsilon(device):
    x = torch.full((3, 8), 1e-4, device=device)
    near(kernels.rms_norm(x, 8), reference.rms_norm(x.double(), 8, eps=torch.finfo(torch.float32).eps))


def test_errors(device, tensor):
    x, y = tensor(4, 8), tensor(8)
    learned = tensor(8).requires_grad_()
    for call, match in (
        (lambda: kernels.add_relu(x, y[:3]), r"shapes \(4, 8\) and \(3,\) do not broadcast"),
        (lambda: kernels.add_relu(x, y.half()), "other has another dtype than x"),
        (lambda: kernels.geglu(x, learned), "forward only; kfconvert.ops has the backward"),
        (lambda: kernels.rms_norm(x, 8, learned), "forward only"),
        (lambda: kernels.add_layer_norm(x, learned, 8), "forward only"),
        (lambda: kernels.rms_norm(x.double(), 8), "do not support float64"),
        (lambda: kernels.layer_norm_act(x, 7), "normalized_shape does not fit"),
        (lambda: kernels.rms_norm(tensor(1, 131073), 131073), "rows of at most 131072 elements, not 131073"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        kernels.layer_norm_act(x, 8, activation="swish")
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="do not support autocast"):
        kernels.add_relu(x, x)
    with torch.no_grad():
        check("geglu", x, learned)


@pytest.mark.cuda
def test_the_longest_rows():
    x = torch.randn(3, 2**17, device="cuda")
    check("layer_norm_act", x, 2**17, x[0], x[1], residual=x, return_sum=True)


@pytest.mark.cuda
@pytest.mark.gpu_memory(24)
def test_more_elements_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    row = x[0].clone()
    for function in (
        lambda x: kernels.multiply_relu(x, x),
        lambda x: kernels.rms_norm(x, 4096, row),
        lambda x: kernels.linear_act(x, row.expand(9, 4096)),
    ):
        result = function(x)
        for part in (slice(0, 2), slice(rows // 2, rows // 2 + 2), slice(rows - 2, rows)):
            assert torch.equal(result[part], function(x[part]))
        del result
