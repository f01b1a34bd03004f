import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.linear_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, out, dtype, device):
    x, weight, bias = torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)
    return tuple(t.to(device, dtype) for t in (x, weight, bias))


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, weight, bias = inputs((5, 48), 24, dtype, device)
    for b in (bias, None):
        check_operator(ops.linear_act, reference, x, weight, b, activation=activation, negative_slope=0.2)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 5, 7), (2, 3, 4, 9), (0, 8), (2, 0, 8), (4, 0), (1, 1)])
@pytest.mark.parametrize("out", [1, 6, 0])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_shapes(device, shape, out, activation):
    x, weight, bias = inputs(shape, out, torch.float32, device)
    for b in (bias, None):
        check_operator(ops.linear_act, reference, x, weight, b, activation=activation)


def test_any_strides(device):
    x, weight, bias = inputs((6, 4, 16), 12, torch.float32, device)
    transposed = weight.t().contiguous().t()
    for view in (x.transpose(0, 1), x[:, ::2], x.expand(6, 4, 16), x[:, 0], x[:, :1]):
        for w in (weight, transposed, weight.repeat(2, 2)[::2, ::2]):
            check_operator(ops.linear_act, reference, view, w, bias.repeat(2)[::2], activation="relu")


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_gradients(device, activation, dtype):
    x, weight, bias = inputs((3, 4, 16), 12, dtype, device)
    weights = [torch.randn(3, 4, 12, device=device).to(dtype)]

    def run(function):
        return lambda *tensors: function(*tensors, activation=activation, negative_slope=0.2)

    check_gradients(run(ops.linear_act), run(reference), [x, weight, bias], weights, activation=activation)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_gradcheck(device, activation):
    leaves = [t.requires_grad_() for t in inputs((2, 3), 4, torch.float64, device)]
    code = ops.ACTIVATIONS[activation].code
    assert torch.autograd.gradcheck(lambda *t: OPERATORS.linear_act(*t, code, 0.01), leaves)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs((2, 3, 8), 4, torch.float32, device)]
        torch.library.opcheck(OPERATORS.linear_act.default, (*tensors, code, 0.01))
    torch.library.opcheck(
        OPERATORS.linear_act_inference.default, (*inputs((5, 8), 4, torch.float32, device), code, 0.01)
    )


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(device, compiled, requires_grad):
    x, weight, bias = inputs((4, 16), 8, torch.float32, device)
    weight.requires_grad_(requires_grad)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = ops.linear_act(x, weight, bias, "silu"), reference(x, weight, bias, "silu")
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)
    if requires_grad:
        y.sum().backward()
        assert weight.grad.dtype == torch.float32


def test_torch_compile_and_export(device):
    class Model(torch.nn.Module):
        def forward(self, x, weight, bias):
            return ops.linear_act(x, weight, bias, "gelu")

    arguments = inputs((4, 16), 8, torch.float32, device)
    with torch.no_grad():
        exported = torch.export.export(Model(), arguments)
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        for module in (exported.module(), compiled):
            torch.testing.assert_close(module(*arguments), reference(*arguments, "gelu"))
    assert any("kfconvert" in str(node.target) for node in exported.graph.nodes)


def test_errors(device, compiled):
    x, weight, bias = inputs((4, 16), 8, torch.float32, device)
    for arguments, match in (
        ((x, weight.t()), r"x of shape \(4, 16\) does not fit weight of shape \(16, 8\) \(out, in\)"),
        ((x, weight, bias[:3]), r"bias has shape \(3,?\), expected \(8,\)"),
        ((x, weight.double()), "weight has another dtype than x"),
        ((x, weight, bias.half()), "bias has another dtype than x"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.linear_act(*arguments)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="unknown activation"):
        ops.linear_act(x, weight, activation="mish")


def test_inference_has_no_autograd_layer(device):
    x, weight, bias = inputs((2, 4), 3, torch.float32, device)
    if not ops.registration.has_kernels(x):
        return
    with torch.no_grad(), torch.profiler.profile() as profile:
        ops.linear_act(x, weight.requires_grad_(), bias, "relu")
    assert any(event.key == "kfconvert::linear_act_inference" for event in profile.key_averages())
