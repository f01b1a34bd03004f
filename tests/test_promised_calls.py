"""The calls that the documents show their readers, arguments in the documents' order, against plain PyTorch."""

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfconvert as kf
from kfconvert.jit import CompileError, toolchain


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


class Values:
    """Random tensors of a device."""

    def __init__(self, device):
        self.device = device
        self.a, self.b, self.x = self(64, 128), self(64, 128), self(4, 32, 96)
        self.weight, self.bias, self.mean, self.slopes = (self(96) for _ in range(4))
        self.var = torch.rand(96, device=device) + 0.5

    def __call__(self, *shape):
        return torch.randn(*shape, device=self.device)


def near(found, wanted, tolerance=2e-5):
    assert found.shape == wanted.shape
    scale = wanted.double().abs().max().item() or 1.0
    assert (found.double() - wanted.double()).abs().max().item() <= tolerance * scale


def of_heads(q, heads):
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


# name -> (the call, plain PyTorch), both of Values
OPERATORS = {
    "elementwise_add_relu": (lambda v: kf.ops.elementwise_add_relu(v.a, v.b), lambda v: F.relu(v.a + v.b)),
    "elementwise_mul_tanh": (lambda v: kf.ops.elementwise_mul_tanh(v.a, v.b), lambda v: torch.tanh(v.a * v.b)),
    "add_relu": (lambda v: kf.ops.add_relu(v.a, v.b), lambda v: F.relu(v.a + v.b)),
    "multiply_relu": (lambda v: kf.ops.multiply_relu(v.a, v.b), lambda v: F.relu(v.a * v.b)),
    "add_sigmoid": (lambda v: kf.ops.add_sigmoid(v.a, v.b), lambda v: torch.sigmoid(v.a + v.b)),
    "swish_multiply": (lambda v: kf.ops.swish_multiply(v.a, v.b), lambda v: F.silu(v.a) * v.b),
    "add_mul_exp": (lambda v: kf.ops.add_mul_exp(v.a * 0.1, v.b * 0.1), lambda v: ((v.a * 0.1 + v.b * 0.1) * 2).exp()),
    "mish_scale": (lambda v: kf.ops.mish_scale(v.x, 0.5), lambda v: F.mish(v.x) * 0.5),
    "fused_bias_gelu": (lambda v: kf.ops.fused_bias_gelu(v.x, v.bias), lambda v: F.gelu(v.x + v.bias)),
    "prelu_bias": (
        lambda v: kf.ops.prelu_bias(v.x, v.slopes, v.bias),
        lambda v: torch.where(v.x + v.bias > 0, v.x + v.bias, v.slopes * (v.x + v.bias)),
    ),
    "fused_layer_norm_relu": (
        lambda v: kf.ops.fused_layer_norm_relu(v.x, normalized_shape=(96,), weight=v.weight, bias=v.bias),
        lambda v: F.relu(F.layer_norm(v.x, (96,), v.weight, v.bias)),
    ),
    "fused_layer_norm_gelu": (
        lambda v: kf.ops.fused_layer_norm_gelu(v.x, (96,), v.weight, v.bias),
        lambda v: F.gelu(F.layer_norm(v.x, (96,), v.weight, v.bias)),
    ),
    "batch_norm_relu": (
        lambda v: kf.ops.batch_norm_relu(v.x[0], v.weight, v.bias, v.mean, v.var),
        lambda v: F.relu(F.batch_norm(v.x[0], v.mean, v.var, v.weight, v.bias)),
    ),
    "rms_norm_gelu": (
        lambda v: kf.ops.rms_norm_gelu(v.x, v.weight, 1e-6),
        lambda v: F.gelu(F.rms_norm(v.x, (96,), v.weight, 1e-6)),
    ),
    "fused_attention_score": (lambda v: kf.ops.fused_attention_score(v.x, v.x, 0.125), lambda v: v.x @ v.x.mT * 0.125),
    "attention_dropout": (lambda v: kf.ops.attention_dropout(v.a, 0.1, False), lambda v: v.a.softmax(-1)),
    "fused_multihead_attention": (
        lambda v: kf.ops.fused_multihead_attention(v.x, v.x, v.x, 4),
        lambda v: of_heads(v.x, 4),
    ),
    "flash_attention": (
        lambda v: kf.ops.flash_attention(v.x, v.x, v.x, scale=0.125),
        lambda v: (v.x @ v.x.mT * 0.125).softmax(-1) @ v.x,
    ),
    "chunked_attention": (
        lambda v: kf.ops.chunked_attention(v.x, v.x, v.x, chunk_size=10),
        lambda v: F.scaled_dot_product_attention(v.x, v.x, v.x),
    ),
    "fused_linear_activation": (
        lambda v: kf.ops.fused_linear_activation(v.x, v.a[:48, :96], v.bias[:48], "gelu"),
        lambda v: F.gelu(F.linear(v.x, v.a[:48, :96], v.bias[:48])),
    ),
    "kernels.fused_gelu_dropout": (lambda v: kf.kernels.fused_gelu_dropout(v.x, 0.1, False), lambda v: F.gelu(v.x)),
    "kernels.fused_layer_norm_relu": (
        lambda v: kf.kernels.fused_layer_norm_relu(v.x, (96,)),
        lambda v: F.relu(F.layer_norm(v.x, (96,))),
    ),
    "kernels.elementwise.add_relu": (lambda v: kf.kernels.elementwise.add_relu(v.a, v.b), lambda v: F.relu(v.a + v.b)),
    "kernels.fusion.layer_norm_relu": (
        lambda v: kf.kernels.fusion.layer_norm_relu(v.x, (96,), v.weight, v.bias),
        lambda v: F.relu(F.layer_norm(v.x, (96,), v.weight, v.bias)),
    ),
    "kernels.reduction.sum_squared": (
        lambda v: kf.kernels.reduction.sum_squared(v.x, dim=-1),
        lambda v: v.x.square().sum(-1),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(device, name):
    values = Values(device)
    call, plain = OPERATORS[name]
    near(call(values), plain(values), 1e-4 if "attention" in name or "linear" in name else 2e-5)


def test_quantize_with_numbers(device):
    x = Values(device).x * 100
    scale = torch.tensor(4.2, device=device)  # by a number ATen does not divide on CUDA: it multiplies by 1 / 4.2
    wanted = torch.clamp(torch.round(x / scale + 1.2), -128, 127).to(torch.int8)
    assert torch.equal(kf.ops.quantize_int8(x, scale=4.2, zero_point=1.2), wanted)


def check_halves(op, device):
    x = torch.randn(2, 4, 8, device=device, requires_grad=True)
    y = op.forward(x.detach())
    near(y, x.softmax(-1).detach())
    grad = torch.randn_like(y)
    near(op.backward(grad, y), torch.autograd.grad(x.softmax(-1), x, grad)[0])


def test_softmax_halves(device):
    check_halves(kf.kernels.SoftMaxOp(), device)


@pytest.mark.cuda
def test_softmax_of_the_gpu():
    check_halves(kf.kernels.get_cuda_softmax(), "cuda")


@pytest.mark.cuda
def test_softmax_of_the_shipped_source(tmp_path, monkeypatch):
    try:
        toolchain.check()
    except CompileError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    module = kf.get_cuda_compiler().compile_from_file("softmax_cuda.cu", "my_softmax")
    op = kf.kernels.SoftMaxOp(module)
    check_halves(op, "cuda")
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn(5, 300, device="cuda").to(dtype)
        torch.testing.assert_close(op.forward(x), x.softmax(-1))


def test_benchmark_kernel(device):
    values = Values(device)
    measured = kf.profiling.benchmark_kernel(torch.add, (values.a, values.b), warmup=2, repeat=3)
    assert measured.repeat == 3 and measured.median_ms > 0


def test_compare_and_plot(device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = matplotlib.get_backend()
    profiler = kf.profiling.KernelProfiler()
    implementations = {"one": torch.relu, "two": F.relu}
    results = profiler.compare_implementations(implementations, args=(Values(device).a,), warmup=1, repeat=3)
    assert [row.agrees for row in results] == [True, True]
    assert profiler.plot_comparison(results).read_bytes().startswith(b"\x89PNG")
    assert matplotlib.get_backend() == backend


def test_quick_benchmark_in_seconds(device):
    measured = kf.profiling.quick_benchmark(torch.relu, Values(device).a)
    assert 0 < measured["mean_time"] < 1


def test_model_inference_printed(device):
    model = nn.Sequential(nn.Linear(128, 8)).to(device)
    report = str(kf.profiling.profile_model_inference(model, Values(device).a))
    assert "ms" in report and any(character.isdigit() for character in report)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x):
        return F.relu(self.norm(F.relu(self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3))))))


SHAPE = (1, 3, 32, 32)


def test_conversion_and_validation(device):
    model = Small().eval().to(device)
    fused = kf.auto_convert_model(model, input_shape=SHAPE, device=device, validate_accuracy=True)
    x = torch.randn(2, 3, 32, 32, device=device)
    near(fused(x), model(x))
    accurate, speedup = kf.validate_optimization(model, fused, x)
    assert accurate and speedup > 0


def test_the_converter_in_its_second_place(device):
    from kfconvert.auto_convert import ModelConverter

    converter = ModelConverter(validate_accuracy=True, accuracy_threshold=1e-6)
    converter.convert_model(Small(), input_shape=SHAPE, device=device)
    replaced = {f"{name}_replaced" for name in ("linear_relu", "conv_bn_relu", "layernorm_relu", "total")}
    assert {*replaced, "speedup_achieved"} <= set(converter.conversion_stats)


def test_t5_by_input_shape(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    model = transformers.T5Model(config).to(device)
    assert kf.auto_convert_model(model, input_shape=(1, 32), device=device, effort="fast").kfconvert_info()["sites"]


@pytest.mark.parametrize(("name", "sizes"), [("FusedLinearReLU", (96, 32)), ("FusedLayerNormReLU", (96,))])
def test_modules_by_hand(device, name, sizes):
    module = getattr(kf.modules, name)(*sizes).to(device)
    module(Values(device).x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
