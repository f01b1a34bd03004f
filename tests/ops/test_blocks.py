import pytest
import torch
from helpers import check_operator

from kfconvert import ops
from kfconvert.kernels import reference


def inputs(shape, out, dtype, device):
    x, weight, bias = torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)
    return tuple(t.to(device, dtype) for t in (x, weight, bias))


def test_torch_compile_and_export(device):
    class Model(torch.nn.Module):
        def forward(self, x, weight, bias):
            return ops.linear_act(x, weight, bias, "gelu")

    arguments = inputs((4, 16), 8, torch.float32, device)
    with torch.no_grad():
        exported = torch.export.export(Model(), arguments)
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        for module in (exported.module(), compiled):
            torch.testing.assert_close(module(*arguments), reference.linear_act(*arguments, "gelu"))
    assert any("kfconvert" in str(node.target) for node in exported.graph.nodes)


def test_inference_has_no_autograd_layer(device):
    x, weight, bias = inputs((2, 4), 3, torch.float32, device)
    if not ops.registration.has_kernels(x):
        return
    with torch.no_grad(), torch.profiler.profile() as profile:
        ops.linear_act(x, weight.requires_grad_(), bias, "relu")
    assert any(event.key == "kfconvert::linear_act_inference" for event in profile.key_averages())


def test_the_result_is_a_view(device):
    """Of what einsum made, whose axes lie in order here: nothing is copied."""
    x, w = torch.randn(4, 5, 6, device=device), torch.randn(6, 8, device=device)
    assert ops.contract("bij,jk->bik", x, w, shape=(20, 8))._base is not None


def block_arguments(name, dtype, device, leading=(2,), size=6):
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


def test_dropout(device):
    tensors, _ = block_arguments("conv2d_gelu_dropout", torch.float32, device, size=40)
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
    tensors, _ = block_arguments("ffn_block", torch.float32, device)
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
