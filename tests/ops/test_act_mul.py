import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.act_mul import reference
from kfconvert.ops.fused.combine_act import Combination

OPERATORS = torch.ops.kfconvert


def inputs(shape, dtype, device):
    """gate and up are the halves of one packed tensor of twice the last size."""
    packed = torch.randn((*shape[:-1], 2 * shape[-1]), device=device).mul(3).to(dtype)
    return packed.chunk(2, -1)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    gate, up = inputs((5, 7, 40), dtype, device)
    for pair in ((gate, up), (up, gate), (gate.contiguous(), up), (gate.contiguous(), up.contiguous())):
        y = check_operator(ops.act_mul, reference, *pair, activation=activation, negative_slope=0.2)
        assert y.is_contiguous()


@pytest.mark.parametrize(
    "shape", [(1,), (17,), (2, 3), (33, 1), (4, 1025), (3, 70_001), (2, 3, 4, 8), (0, 8), (8, 0), (2, 0, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(device, shape, dtype):
    check_operator(ops.act_mul, reference, *inputs(shape, dtype, device), activation="silu")


def test_a_scalar(device):
    gate, up = torch.randn(2, device=device).unbind()
    check_operator(ops.act_mul, reference, gate, up, activation="gelu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides(device, dtype):
    base = torch.randn(6, 10, 16, device=device).to(dtype)
    other = torch.randn(6, 10, 16, device=device).to(dtype)
    for view in (
        lambda t: t.transpose(0, 1),
        lambda t: t.transpose(1, 2),
        lambda t: t[..., ::2],
        lambda t: t[:, ::2],
        lambda t: t[::2, :, 3:11],
        lambda t: t[:, :5],
        lambda t: t[:1].expand(6, 10, 16),
        lambda t: t[..., :1].expand(6, 10, 16),
        lambda t: t.flatten()[1:].unflatten(0, (7, 137)),
    ):
        for pair in ((view(base), view(other)), (view(base), view(other).contiguous())):
            check_operator(ops.act_mul, reference, *pair, activation="silu")


def test_halves_along_the_channels_of_images(device):
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 12, 5, 7, device=device).contiguous(memory_format=layout)
        check_operator(ops.act_mul, reference, *x.chunk(2, 1), activation="sigmoid")


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_special_values_as_aten_in_float64(device, activation, dtype):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0, -2.0, 60000.0, -60000.0, 1e-30]
    gate, up = torch.cartesian_prod(*[torch.tensor(special, device=device, dtype=dtype)] * 2).t().contiguous()
    got = ops.act_mul(gate, up, activation)
    want = reference(gate.double(), up.double(), activation).to(dtype)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, equal_nan=True)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_gradients(device, activation, dtype):
    weights = [torch.randn(3, 8, 6, device=device).to(dtype)]

    def run(function):
        return lambda h: function(*h.chunk(2, -1), activation=activation, negative_slope=0.2)

    packed = torch.randn(3, 8, 12, device=device).to(dtype)
    check_gradients(run(ops.act_mul), run(reference), [packed], weights, activation=activation)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gradcheck(device, activation):
    leaves = [t.clone().requires_grad_() for t in inputs((2, 3, 4), torch.float64, device)]
    code = ops.ACTIVATIONS[activation].code
    assert torch.autograd.gradcheck(lambda *t: OPERATORS.combine_act(*t, Combination.GATED, code, 0.2), leaves)


def test_gradient_of_one_input(device):
    gate, up = (t.clone() for t in inputs((3, 8), torch.float64, device))
    for wanted, fixed in ((gate, up), (up, gate)):
        wanted.requires_grad_(), fixed.requires_grad_(False)
        want = torch.autograd.grad(reference(gate, up, "silu").sum(), wanted)
        torch.testing.assert_close(torch.autograd.grad(ops.act_mul(gate, up, "silu").sum(), wanted), want)


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "quick_gelu"])
def test_opcheck(device, activation):
    options = (Combination.GATED, ops.ACTIVATIONS[activation].code, 0.01)
    for requires_grad in (False, True):
        tensors = [t.requires_grad_(requires_grad) for t in inputs((2, 3, 8), torch.float32, device)]
        torch.library.opcheck(OPERATORS.combine_act.default, (*tensors, *options))
    gate, up = inputs((5, 8), torch.float32, device)
    torch.library.opcheck(OPERATORS.combine_act_inference.default, (gate, up, *options))
    torch.library.opcheck(OPERATORS.combine_act_backward.default, (torch.randn_like(gate), gate, up, *options))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(device, compiled, requires_grad):
    gate, up = (t.clone() for t in inputs((4, 16), torch.float32, device))
    gate.requires_grad_(requires_grad)
    with torch.autocast(device, dtype=torch.bfloat16):
        for pair in ((gate, up), (gate.bfloat16(), up.bfloat16()), (gate.bfloat16(), up)):
            y, want = ops.act_mul(*pair, "gelu"), reference(*pair, "gelu")
            assert y.dtype == want.dtype
            # ATen rounds act(gate) to bfloat16 before it widens it for the product with a float32 up.
            torch.testing.assert_close(y, want, rtol=2**-7, atol=1e-5)


def test_torch_compile_and_export(device):
    class Model(torch.nn.Module):
        def forward(self, h):
            return ops.act_mul(*h.chunk(2, -1), "silu")

    h = torch.randn(4, 16, device=device)
    with torch.no_grad():
        exported = torch.export.export(Model(), (h,))
        compiled = torch.compile(Model(), backend="aot_eager", fullgraph=True)
        for module in (exported.module(), compiled):
            torch.testing.assert_close(module(h), reference(*h.chunk(2, -1), "silu"))
    assert any("kfconvert" in str(node.target) for node in exported.graph.nodes)


def test_errors(device, compiled):
    gate, up = inputs((4, 8), torch.float32, device)
    for arguments, match in (
        ((gate, up[:, :3]), r"shapes \(4, 8\) and \(4, 3\) do not broadcast"),
        ((gate, up.double()), "other has another dtype than x"),
        ((gate.int(), up.int()), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.act_mul(*arguments, "silu")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="unknown activation"):
        ops.act_mul(gate, up, "snake")


@pytest.mark.cuda
def test_more_than_2_30_elements():
    packed = torch.ones(2**30 // 4096 + 3, 2 * 4096, device="cuda", dtype=torch.float16)
    packed[:, 4096:] = torch.arange(4096, device="cuda") % 7
    gate, up = packed.chunk(2, -1)
    y = ops.act_mul(gate, up, "relu")
    assert torch.equal(y[0], up[0]) and torch.equal(y[-1], up[-1])


@pytest.mark.cuda
def test_graph():
    packed = torch.randn(64, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = ops.act_mul(*packed.chunk(2, -1), "silu")
    packed.normal_()
    graph.replay()
    torch.testing.assert_close(y, reference(*packed.chunk(2, -1), "silu"))
