"""The named norms against their definitions in plain ATen."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator

from kfconvert import ops
from kfconvert.kernels import reference

LAYER_NORMS = ["layer_norm_relu", "layer_norm_gelu", "layer_norm_silu"]
RMS_NORMS = ["rms_norm", "rms_norm_gelu"]


def arguments(name, dtype, device, shape=(3, 6, 8)):
    """(tensors, the others by name) of a call with an x of ``shape``."""
    channels = shape[1] if name in ("group_norm_silu", "batch_norm_relu") else shape[-1]

    def vector(spread=0.3, around=0.0):
        return torch.randn(channels, device=device).mul(spread).add(around).to(dtype)

    x = torch.randn(shape, device=device).mul(2).add(0.5).to(dtype)
    if name == "batch_norm_relu":
        return [x, vector(around=1), vector(), vector(), vector().abs() + 0.5], {}
    if name == "group_norm_silu":
        return [x, vector(around=1), vector()], {"num_groups": 2}
    rest = {"normalized_shape": channels, "eps": 1e-5}
    if name.startswith("add"):
        residual = [torch.randn(shape, device=device).to(dtype)]
    else:
        residual = []
    return [x, *residual, vector(around=1), *([] if "rms" in name else [vector()])], rest


def call(package, name, rest):
    """A function of the tensors alone."""
    if name == "batch_norm_relu":
        names = ["x", "weight", "bias", "running_mean", "running_var"]
    else:
        names = ["x", "residual", "weight", "bias"] if name.startswith("add") else ["x", "weight", "bias"]
    return lambda *tensors: getattr(package, name)(**dict(zip(names, tensors)), **rest)


NAMES = [*LAYER_NORMS, *RMS_NORMS, "add_layer_norm", "add_rms_norm", "group_norm_silu", "batch_norm_relu"]
SHAPES = [(3, 6, 8), (2, 4, 3, 5, 6), (70, 16), (0, 4, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_as_accurate_as_aten(device, name, dtype):
    for shape in SHAPES:
        tensors, rest = arguments(name, dtype, device, shape)
        check_operator(call(ops, name, rest), call(reference, name, rest), *tensors)


@pytest.mark.parametrize("name", NAMES)
def test_layouts(device, name):
    tensors, rest = arguments(name, torch.float32, device, (2, 6, 4, 8))
    x = tensors[0]
    for layout in (
        x.contiguous(memory_format=torch.channels_last),
        x.mT.contiguous().mT,
        x.repeat_interleave(2, -1)[..., ::2],
    ):
        check_operator(call(ops, name, rest), call(reference, name, rest), layout, *tensors[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(device, name, dtype):
    tensors, rest = arguments(name, dtype, device, (3, 6, 8))
    outputs = 2 if name.startswith("add") else 1
    weights = [torch.randn(3, 6, 8, device=device).to(dtype) for _ in range(outputs)]
    operator, definition = call(ops, name, rest), call(reference, name, rest)
    if name == "batch_norm_relu":  # whose statistics have no gradient
        *tensors, mean, var = tensors
        operator, definition = (
            lambda x, w, b, f=f: f(x, w, b, mean.to(x.dtype), var.to(x.dtype)) for f in (operator, definition)
        )
    check_gradients(operator, definition, tensors, weights)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(device, name):
    tensors, rest = arguments(name, torch.float64, device, (2, 4, 3))
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(name != "batch_norm_relu" or i < 3)
    assert torch.autograd.gradcheck(call(ops, name, rest), tensors)


@pytest.mark.parametrize("name", NAMES)
def test_compile(device, name):
    tensors, rest = arguments(name, torch.float32, device, (2, 4, 6))
    operator = call(ops, name, rest)
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), operator(*tensors))
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_autocast(device, compiled, name):
    tensors, rest = arguments(name, torch.float32, device, (2, 4, 6))
    tensors[0] = tensors[0].bfloat16()
    if "group" in name and device == "cpu":  # which ATen does not take with float32 weights
        tensors[1:] = [t.bfloat16() for t in tensors[1:]]
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = (call(package, name, rest)(*tensors) for package in (ops, reference))
    # Which dtype F.rms_norm returns depends on the device and the version of torch.
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2, check_dtype="rms" not in name)


@pytest.mark.parametrize("shape", [(1, 4), (2, 0, 3), (2, 4, 0), (0, 4, 3)])
def test_group_norm_is_the_same_with_a_gradient(device, compiled, shape):
    tensors = [torch.randn(s, device=device, dtype=torch.float64) for s in (shape, shape[1:2], shape[1:2])]
    groups = shape[1] or 2
    want = ops.group_norm_silu(tensors[0], groups, *tensors[1:])
    leaves = [t.requires_grad_() for t in tensors]
    for package in (ops, reference):
        y = package.group_norm_silu(leaves[0], groups, *leaves[1:])
        torch.testing.assert_close(y, want)
        grads = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(grads[0], torch.zeros_like(grads[0]))
    assert torch.autograd.gradcheck(lambda *t: ops.group_norm_silu(t[0], groups, *t[1:]), leaves)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_the_sum_requires_a_gradient_where_its_terms_do(device, compiled, name):
    tensors, rest = arguments(name, torch.float32, device)
    for wanted in range(len(tensors)):
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(i == wanted)
        y, total = call(ops, name, rest)(*tensors)
        assert y.requires_grad and total.requires_grad == (wanted < 2)
        want = torch.autograd.grad(call(reference, name, rest)(*tensors)[0].square().sum(), tensors[wanted])
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), tensors[wanted]), want)


@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_no_result_is_an_argument(device, compiled, name, requires_grad):
    x = torch.randn(3, 8, device=device, requires_grad=requires_grad)
    for package in (ops, reference):
        _, total = getattr(package, name)(x, None, 8)
        assert torch.equal(total, x) and total.requires_grad == requires_grad
        assert total.data_ptr() != x.data_ptr()


def test_position_embeddings_repeat(device, compiled):
    x, residual = torch.randn(3, 5, 8, device=device), torch.randn(5, 8, device=device)
    for name in ("add_layer_norm", "add_rms_norm"):
        y, total = check_operator(getattr(ops, name), getattr(reference, name), x, residual, 8)
        assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_eps_of_rms_norm(device, dtype):
    x = torch.full((2, 8), 1e-4, device=device, dtype=dtype)
    want = F.rms_norm(x, (8,))
    torch.testing.assert_close(ops.rms_norm(x, 8), want)
    torch.testing.assert_close(ops.rms_norm_gelu(x, (8,)), F.gelu(want))
    torch.testing.assert_close(ops.add_rms_norm(x, torch.zeros_like(x), 8)[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_batch_norm_updates_statistics_in_training(device, compiled, dtype, requires_grad):
    (x, *affine, mean, var), _ = arguments("batch_norm_relu", dtype, device, (4, 6, 5, 5))
    x.requires_grad_(requires_grad)
    mine, theirs = ([mean.clone(), var.clone()] for _ in "ab")
    y = ops.batch_norm_relu(x, *affine, *mine, training=True, momentum=0.3, eps=1e-3)
    want = F.relu(F.batch_norm(x, *theirs, *affine, training=True, momentum=0.3, eps=1e-3))
    assert torch.equal(y, want) and torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    plain = F.batch_norm(x, None, None, training=True).relu()
    assert torch.equal(ops.batch_norm_relu(x, None, None, None, None, training=True), plain)
    if requires_grad:
        grads = [torch.autograd.grad(result.square().sum(), x)[0] for result in (y, want)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(3, 6, 8), (2, 16, 128, 64), (2**15, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_in_eval(device, dtype, shape):
    """Small and large inputs, with statistics of their own dtype and of float32 beside a half type."""
    (x, *vectors), _ = arguments("batch_norm_relu", dtype, device, shape)
    for vectors in (vectors, [v.float() for v in vectors]) if x.element_size() == 2 else (vectors,):
        before = [v.clone() for v in vectors]
        for given in (vectors, [None, *vectors[1:]], [vectors[0], None, *vectors[2:]]):
            check_operator(ops.batch_norm_relu, reference.batch_norm_relu, x, *given)
        assert all(torch.equal(*pair) for pair in zip(vectors, before))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(7, 6), (7, 6, 3)])
def test_batch_norm_with_strided_vectors(device, shape, training):
    x, *vectors = arguments("batch_norm_relu", torch.float32, device, shape)[0]
    for strided in range(4):
        grads = []
        for given in (vectors, [v.repeat_interleave(3)[::3] if i == strided else v for i, v in enumerate(vectors)]):
            *affine, mean, var = (v.detach() for v in given)
            leaves = [t.requires_grad_() for t in (x.clone(), *affine)]
            y = ops.batch_norm_relu(*leaves, mean.clone() if training else mean, var, training=training)
            grads.append(torch.autograd.grad(y.square().sum(), leaves))
        torch.testing.assert_close(*grads)


def test_batch_norm_errors(device, compiled):
    (x, weight, bias, mean, var), _ = arguments("batch_norm_relu", torch.float32, device)
    for changed, message in (
        ({"x": x.long()}, "expected float64, float32, float16 or bfloat16"),
        ({"x": x[0, 0]}, r"expected \(N, C, ...\)"),
        ({"running_mean": None}, "needed outside of training"),
        ({"running_mean": None, "training": True}, "both be given or both be None"),
        ({"weight": weight[:3]}, r"weight has shape \(3,\), but x has 6 channels in dim 1"),
        ({"weight": weight.double()}, "weight has another dtype than x"),
        ({"x": x.half(), "weight": weight.half()}, "have different dtypes"),
    ):
        named = {"x": x, "running_mean": mean, "running_var": var, "weight": weight, "bias": bias, **changed}
        with pytest.raises(RuntimeError, match=message) as error:
            ops.batch_norm_relu(**named)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ops.batch_norm_relu(x[:1, :, 0], weight, bias, mean, var, training=True)


@pytest.mark.parametrize("name", NAMES)
def test_errors(device, compiled, name):
    tensors, rest = arguments(name, torch.float32, device, (4, 4, 4))
    for i, wrong in ((1, torch.float64), (0, torch.int64)):
        changed = [t.to(wrong) if i == j else t for j, t in enumerate(tensors)]
        with pytest.raises(RuntimeError) as error:
            call(ops, name, rest)(*changed)
        assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="shape"):
        call(ops, name, rest)(*tensors[:-1], tensors[-1][:3])


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_two_devices(name):
    tensors, rest = arguments(name, torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="another device"):
        call(ops, name, rest)(*tensors[:-1], tensors[-1].cpu())


def test_other_names():
    assert ops.fused_layer_norm_relu is ops.layer_norm_relu and ops.fused_add_norm is ops.add_layer_norm
    assert ops.fused_add_rms_norm is ops.add_rms_norm
