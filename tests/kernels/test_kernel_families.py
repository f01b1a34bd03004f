"""The families of kfconvert.kernels: their names, that the compiled ones run compiled kernels, what they refuse."""

import inspect

import pytest
import torch
from support.devices import DEVICES, compiled_operators
from support.operator_arguments import arguments
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import extension, kernels, ops
from kfconvert.kernels import compiled


@pytest.fixture(params=DEVICES)
def device(request):
    loaded = extension.EXTENSION_LOADED if request.param == "cpu" else extension.CUDA_KERNELS_LOADED
    if not loaded:
        pytest.skip(extension.load_errors[request.param])
    return request.param


def family(name):
    if name == "triton":
        pytest.importorskip("triton")
    return getattr(kernels, name)


@pytest.mark.parametrize("name", kernels.FAMILIES)
def test_names_and_signatures(name):
    functions = family(name)
    assert functions.__all__
    for operator in functions.__all__:
        assert operator in ops.__all__
        mine, theirs = (inspect.signature(getattr(of, operator)) for of in (functions, ops))
        assert [(p.name, p.kind, p.default) for p in mine.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ], operator


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'opencl'"):
        kernels.opencl  # noqa: B018
    assert {"cpu", "cuda", "reference", "triton", "elementwise", "fusion", "reduction"} < set(dir(kernels))


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", compiled.NAMES)
def test_compiled_kernels_run(device, name):
    values = arguments(name, device)
    with Calls() as calls:
        torch.manual_seed(1)
        got = getattr(getattr(kernels, device), name)(*values)
    ours = [call.removeprefix("kfconvert::") for call in calls.names if call.startswith("kfconvert::")]
    assert ours and set(ours) <= compiled_operators(device)
    with Calls():  # in any dispatch mode a dropout draws its seed on the device
        torch.manual_seed(1)
        want = getattr(ops, name)(*values)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_every_compiled_operator_has_a_name(device):
    called = set()
    for name in compiled.NAMES:
        with Calls() as calls:
            getattr(ops, name)(*arguments(name, device))
        called |= {call.removeprefix("kfconvert::").removesuffix("_inference") for call in calls.names}
    known = {name.removesuffix("_inference") for name in compiled_operators(device)}
    endings = ("_backward", "_gradients", "_training", "act_")  # forms of those that are called
    forms = {name for name in known if name.endswith(endings)}
    # No functions: two write to what a step of generation has, one reads weights before the kernels ahead have ended,
    # and modules call two of Triton if they are faster.
    of_modules = {"attention_triton", "decode_attention_", "linear_triton", "next_token_", "skinny_linear"}
    assert known - forms - of_modules <= called


def test_gradients_stay(device):
    functions = getattr(kernels, device)
    norms = ("group_norm_silu", "layer_norm_silu", "rms_norm")
    for name in ("add_relu", "bias_gelu", *norms, "softmax", "cross_entropy", "mse_loss"):
        x, *rest = arguments(name, device)
        grads = []
        for function in (getattr(functions, name), getattr(ops, name)):
            leaf = x.clone().requires_grad_()
            grads.append(torch.autograd.grad(function(leaf, *rest).square().sum(), leaf)[0])
        assert torch.equal(*grads)


def test_calls_that_would_run_on_aten_are_refused(device):
    functions, (x, y) = getattr(kernels, device), arguments("add_relu", device)
    image = torch.randn(2, 6, 5, device=device)
    leaf, scale = image.clone().requires_grad_(), torch.ones(1, device=device, requires_grad=True)
    channels = torch.ones(6, device=device)
    for call, match in (
        (lambda: functions.softmax(x, 0), "softmax: the kernel takes the last dimension"),
        (lambda: functions.softmax(x[0, 0]), "the last dimension"),
        (lambda: functions.reduce_sum_squared(x, 0), "reduce_sum_squared: .* last dimensions of contiguous"),
        (lambda: functions.reduce_mean_abs(x, dim=0), "last dimensions of contiguous"),
        (lambda: functions.mse_loss(x, y, reduction="none"), "a mean or a sum"),
        (lambda: functions.mse_loss(x, y[:1]), "tensors with equal shapes"),
        (lambda: functions.mse_loss(x, y.t().contiguous().t()), "contiguous tensors"),
        (lambda: functions.mish_scale(x.half(), 0.5), "of half types the kernel takes a tensor"),
        (lambda: functions.gelu_dropout(x, 1.0), "p below 1"),
        (lambda: functions.bias_dropout_add(x, None, y, p=1), "p below 1"),
        (lambda: functions.scale_shift_act(image, channels, shift=leaf[0, :, 0]), "no backward"),
        (lambda: functions.dequantize_int8(x.to(torch.int8), scale), "dequantize_int8: the kernel has no backward"),
    ):
        with pytest.raises(RuntimeError, match=f"kfconvert.kernels.{device}.*{match}.*plain ATen"):
            call()
    ids, word, *tables = arguments("embedding_layer_norm", device)
    with pytest.raises(RuntimeError, match="embedding_layer_norm: the kernel has no backward; .*plain ATen"):
        functions.embedding_layer_norm(ids, word.requires_grad_(), *tables)
    with pytest.raises(RuntimeError, match="the kernel does not support autocast"), torch.autocast(device):
        functions.embedding_layer_norm(ids, word.detach(), *tables)
    with torch.no_grad():
        functions.dequantize_int8(x.to(torch.int8), scale)
    functions.gelu_dropout(x, 1.0, training=False)


@pytest.mark.parametrize("name", compiled.NAMES)
def test_another_device_is_refused(monkeypatch, name):
    monkeypatch.setattr(extension, "EXTENSION_LOADED", True)
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", True)
    for functions, other in ((kernels.cpu, "meta"), (kernels.cuda, "cpu")):
        with pytest.raises(RuntimeError, match=rf"^kfconvert.kernels.\w+.{name}: \w+ is on {other}$"):
            getattr(functions, name)(*arguments(name, other))


@pytest.mark.cuda
def test_tensors_on_two_devices_are_refused():
    x, y = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="kfconvert.kernels.cuda.add_relu: y is on cpu"):
        kernels.cuda.add_relu(y, y=x)
    with pytest.raises(RuntimeError, match="kfconvert.kernels.cpu.add_relu: y is on cuda:0"):
        kernels.cpu.add_relu(x, y)


def test_a_missing_library_is_told(monkeypatch):
    monkeypatch.setattr(extension, "EXTENSION_LOADED", False)
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", False)
    monkeypatch.setattr(extension, "load_errors", {"cpu": "_ops_cpu.so was not built", "cuda": "no CUDA"})
    x = torch.ones(3)
    for functions, reason in ((kernels.cpu, "_ops_cpu.so was not built"), (kernels.cuda, "no CUDA")):
        with pytest.raises(RuntimeError, match=rf"add_relu: no compiled kernels: {reason}$"):
            functions.add_relu(x, x)


def test_compile(device):
    add_relu, (x, y) = getattr(kernels, device).add_relu, arguments("add_relu", device)
    function = torch.compile(lambda x, y: add_relu(x, y) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x, y), torch.relu(x + y) + 1)


def test_triton_needs_cuda_tensors():
    """Outside of Triton's interpreter, as here."""
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="Triton needs CUDA tensors"):
        kernels.triton.add_relu(torch.ones(3), torch.ones(3))
