"""Blocks of models against their definitions in plain ATen."""

import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator

from kfconvert import ops
from kfconvert.kernels import reference

CONVOLUTIONS = ["conv2d_bn_act", "conv2d_gelu_dropout", "depthwise_pointwise"]
NAMES = ["fused_linear_activation", "ffn_block", *CONVOLUTIONS]


def arguments(name, dtype, device, leading=(2,), size=6):
    """(tensors, the others) of a call; x has the ``leading`` dimensions and, if an image, the ``size``."""

    def tensor(*shape):
        return torch.randn(shape, device=device).to(dtype)

    if name == "fused_linear_activation":
        return [tensor(*leading, 5, 8), tensor(12, 8), tensor(12)], ["silu"]
    if name == "ffn_block":
        return [tensor(*leading, 5, 8), tensor(12, 8), tensor(12), tensor(7, 12), tensor(7)], []
    x = tensor(*leading, 4, size, size)
    if name == "conv2d_bn_act":
        statistics = tensor(6), (tensor(6).abs() + 0.5)
        return [x, tensor(6, 4, 3, 3), tensor(6), *statistics, tensor(6), tensor(6)], ["silu", 1, 1]
    if name == "conv2d_gelu_dropout":
        return [x, tensor(6, 4, 3, 3), tensor(6)], [0.4, False, 1, 1]
    return [x, tensor(8, 1, 3, 3), tensor(8), tensor(6, 8, 1, 1), tensor(6)], ["relu", 1, 1]


def call(package, name, rest):
    """A function of the tensors alone."""
    return lambda *tensors: getattr(package, name)(*tensors, *rest)


def compare_all(name, tensors, rest):
    factor = 4 if tensors[0].is_cuda else 2  # a library's sum in another order
    return check_operator(call(ops, name, rest), call(reference, name, rest), *tensors, factor=factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_as_accurate_as_aten(device, name, dtype):
    for leading in ((2,), (), (0,)):
        tensors, rest = arguments(name, dtype, device, leading)
        compare_all(name, tensors, rest)


@pytest.mark.parametrize("name", NAMES)
def test_without_biases(device, name):
    tensors, rest = arguments(name, torch.float32, device)
    statistics = (3, 4) if name == "conv2d_bn_act" else ()
    tensors = [t if t.dim() > 1 or i in statistics else None for i, t in enumerate(tensors)]
    compare_all(name, tensors, rest)


@pytest.mark.parametrize("name", NAMES)
def test_layouts(device, name):
    tensors, rest = arguments(name, torch.float32, device)
    x = tensors[0]
    layouts = [x.mT.contiguous().mT, x.repeat_interleave(2, -1)[..., ::2]]
    if x.dim() == 4:
        layouts.append(x.contiguous(memory_format=torch.channels_last))
    for layout in layouts:
        y = compare_all(name, [layout, *tensors[1:]], rest)
    if x.dim() == 4:
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(device, name, dtype):
    tensors, rest = arguments(name, dtype, device)
    operator, definition = (call(package, name, rest) for package in (ops, reference))
    if name == "conv2d_bn_act":
        # The statistics have no gradient.
        *first, mean, var, weight, bias = tensors
        tensors = [*first, weight, bias]
        operator, definition = (
            lambda *t, f=f: f(*t[:3], mean.to(t[0].dtype), var.to(t[0].dtype), *t[3:]) for f in (operator, definition)
        )
    weights = [torch.randn_like(definition(*tensors))]
    check_gradients(operator, definition, tensors, weights, factor=3)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(device, name):
    tensors, rest = arguments(name, torch.float64, device, (1,), 3)
    statistics = (3, 4) if name == "conv2d_bn_act" else ()
    tensors = [t.requires_grad_(i not in statistics) for i, t in enumerate(tensors)]
    assert torch.autograd.gradcheck(call(ops, name, rest), tensors)


@pytest.mark.parametrize("name", NAMES)
def test_compile(device, name):
    tensors, rest = arguments(name, torch.float32, device)
    compiled = torch.compile(call(ops, name, rest), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), call(ops, name, rest)(*tensors))
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_autocast(device, compiled, name):
    tensors, rest = arguments(name, torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = (call(package, name, rest)(*tensors) for package in (ops, reference))
    assert got.dtype == want.dtype == torch.bfloat16
    exact = call(reference, name, rest)(*tensors)
    torch.testing.assert_close(got.float(), exact, rtol=5e-2, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_activations(device, activation):
    for name in ("fused_linear_activation", "ffn_block", "depthwise_pointwise"):
        tensors, rest = arguments(name, torch.float32, device)
        compare_all(name, tensors, [activation, *rest[1:]])
    tensors, rest = arguments("conv2d_bn_act", torch.float32, device)
    y, plain = (ops.conv2d_bn_act(*tensors, act, *rest[1:]) for act in (activation, "none"))
    torch.testing.assert_close(y, ops.apply_activation(plain, activation))


def test_geometry(device):
    for rest in ([2, 1, 1], [1, (2, 1), (2, 1)], [(1, 2), "valid"]):
        for name in CONVOLUTIONS:
            tensors, (first, *_) = arguments(name, torch.float32, device)
            compare_all(name, tensors, [first, *([False] if "dropout" in name else []), *rest])
    x, weight, bias, *vectors = arguments("conv2d_bn_act", torch.float32, device)[0]
    compare_all("conv2d_bn_act", [x, weight[:, :2], bias, *vectors], ["none", 1, 0, 1, 2, 0.1])
    compare_all("conv2d_gelu_dropout", [x, weight[:, :2], bias], [0.1, False, 1, 0, 1, 2])


def test_an_image_without_a_batch(device):
    x, weight = torch.randn(2, 7, 8, device=device), torch.randn(4, 2, 3, 3, device=device)
    vectors = torch.rand(5, 4, device=device) + 0.5
    compare_all("conv2d_bn_act", [x, weight, *vectors], ["silu", 2, (1, 0)])
    got, want = (reference.conv2d_bn_act(t, weight, *vectors, "silu", 2, (1, 0)) for t in (x, x[None]))
    torch.testing.assert_close(got, want[0])


def test_statistics_of_another_dtype(device):
    tensors, rest = arguments("conv2d_bn_act", torch.float16, device)
    wide = [*tensors[:3], *(t.float() for t in tensors[3:])]
    compare_all("conv2d_bn_act", wide, rest)


def test_dropout(device):
    tensors, _ = arguments("conv2d_gelu_dropout", torch.float32, device, size=40)
    whole = ops.conv2d_gelu_dropout(*tensors, 0.4, False)
    results = []
    for package in (ops, reference):
        torch.manual_seed(1)
        results.append(package.conv2d_gelu_dropout(*tensors, 0.4))
    torch.testing.assert_close(*results)
    kept = results[0] != 0
    assert 0.58 < kept[whole != 0].float().mean() < 0.62
    torch.testing.assert_close(results[0][kept], whole[kept] / 0.6)
    with pytest.raises(ValueError, match="p must be between 0 and 1"):
        ops.conv2d_gelu_dropout(*tensors, -0.1)


def test_dropout_of_ffn_block(device, compiled):
    tensors, _ = arguments("ffn_block", torch.float32, device)
    tensors[1:3] = torch.randn(500, 8, device=device), torch.randn(500, device=device)
    tensors[3] = torch.randn(7, 500, device=device)
    compare_all("ffn_block", tensors, ["gelu", 0.4, False])
    results = []
    for package in (ops, reference):
        torch.manual_seed(1)
        results.append(package.ffn_block(*tensors, "gelu", 0.4))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    # Each hidden value is kept in six of ten cases, and divided by 0.6: the mean over many calls is that of none.
    whole = ops.ffn_block(*tensors, "gelu", training=True)
    mean = torch.stack([ops.ffn_block(*tensors, "gelu", 0.4) for _ in range(400)]).mean(0)
    assert (mean - whole).abs().max() < 0.25 * whole.abs().max()
    zeros = ops.ffn_block(*tensors, "gelu", 1.0)
    torch.testing.assert_close(zeros, tensors[4].expand_as(zeros))
    with pytest.raises(ValueError, match="dropout_p must be between 0 and 1"):
        ops.ffn_block(*tensors, "gelu", 1.5, False)


def test_errors(device, compiled):
    (x, weight, bias), _ = arguments("conv2d_gelu_dropout", torch.float32, device)
    _, _, _, mean, var, _, _ = arguments("conv2d_bn_act", torch.float32, device)[0]
    depthwise, pointwise = torch.ones(8, 1, 3, 3, device=device), torch.ones(6, 8, 1, 1, device=device)
    separable = ops.depthwise_pointwise
    conv_bn, rest = ops.conv2d_bn_act, (None, None, "relu")
    for function, given, message in (
        (conv_bn, (x, weight[0], bias, mean, var, *rest), r"expected \(out, in / groups, height, width\)"),
        (conv_bn, (x, weight, bias, mean[:3], var, *rest), "running_mean has shape"),
        (conv_bn, (x, weight, bias[:3], mean, var, *rest), "bias has shape"),
        (conv_bn, (x, weight, bias.half(), mean, var, *rest), "bias has another dtype"),
        (conv_bn, (x, weight.half(), None, mean, var, *rest), "weight has another dtype"),
        (ops.conv2d_gelu_dropout, (x, weight[:, :, 0], bias, 0.1), "weight has shape"),
        (ops.conv2d_gelu_dropout, (x[:, :3], weight, bias, 0.1), "x has 3 channels, expected 4"),
        (separable, (x[:, :3], depthwise, None, pointwise, None, "relu"), "but x has 3 channels"),
        (separable, (x, depthwise, None, pointwise[:, :4], None, "relu"), r"expected \(out, 8, 1, 1\)"),
        (separable, (x, depthwise[0], None, pointwise, None, "relu"), "depthwise_weight has shape"),
        (separable, (x[0, 0], depthwise, None, pointwise, None, "relu"), "x has shape"),
        (separable, (x, depthwise.half(), None, pointwise, None, "relu"), "weight has another dtype than x"),
        (ops.ffn_block, (x, depthwise, None, pointwise, None), "does not fit weight"),
    ):
        with pytest.raises(RuntimeError, match=message) as error:
            function(*given)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="unknown activation"):
        separable(x, depthwise, None, pointwise, None, "mish")


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_two_devices(name):
    tensors, rest = arguments(name, torch.float32, "cuda")
    with pytest.raises(RuntimeError, match="another device"):
        call(ops, name, rest)(*tensors[:-1], tensors[-1].cpu())
