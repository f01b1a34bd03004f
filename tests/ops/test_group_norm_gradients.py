import pytest
import torch
from helpers import DTYPES, check_gradients
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops import group_norm_act
from kfconvert.ops.fused.group_norm_act import _compose_backward, _compose_training, reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, dtype, device):
    x = torch.randn(shape, device=device).mul(2).add(0.5).to(dtype)
    return x, *torch.randn(2, shape[1], device=device).to(dtype)


def check_operator(tensors, groups, activation, factor=1.5):
    grads = [torch.randn(tensors[0].shape, device=tensors[0].device).to(tensors[0].dtype)]

    def run(function):
        return lambda x, *affine: function(x, groups, *affine, activation=activation, negative_slope=0.2)

    mine, aten = run(group_norm_act), run(reference)
    check_gradients(mine, aten, tensors, grads, factor, activation)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_activations(device, dtype, activation):
    for shape in ((3, 8, 6, 8), (2, 6, 5, 5)):
        # Of the gradients of a few channels it is chance whose error is the larger one.
        check_operator(inputs(shape, dtype, device), 2, activation, factor=4)


# On CUDA: rows in registers, in packs and element by element, of many pieces and of few, with threads to spare; then
# rows too long for them, of few long channels and of many short ones.
SHAPES = [
    ((2, 12), 3), ((2, 6, 5), 6), ((2, 6, 5), 1), ((3, 64), 2), ((5, 16, 2, 2), 4), ((2, 6, 4, 8), 3),
    ((2, 64, 7, 7), 4), ((2, 64, 14, 14), 8), ((3, 192, 16, 16), 32), ((2, 256, 16, 16), 8), ((2, 3, 1000), 3),
    ((2, 4, 8192), 4), ((2, 4, 3, 4, 8), 2), ((2, 260, 16), 1), ((2, 6000), 1), ((2, 512, 8, 8), 1),
    ((1, 8, 33, 65), 2), ((2, 16, 64, 64), 4), ((2, 2, 20000), 1), ((2, 4, 9999), 4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_shapes(device, shape, groups, dtype):
    tensors = inputs(shape, dtype, device)
    if dtype != torch.float64:
        return check_operator(tensors, groups, "silu", factor=4)  # chance, as above
    leaves, grad = [t.requires_grad_() for t in tensors], torch.randn_like(tensors[0])
    got, want = (
        torch.autograd.grad(f(leaves[0], groups, *leaves[1:], activation="silu"), leaves, grad)
        for f in (group_norm_act, reference)
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 1, 1)])
def test_groups_of_one_value(device, shape, dtype):
    leaves = [t.requires_grad_() for t in inputs(shape, dtype, device)]
    y = group_norm_act(leaves[0], shape[1], *leaves[1:], activation="silu")
    grad = torch.randn_like(y)
    grad_x, grad_weight, grad_bias = torch.autograd.grad(y, leaves, grad)
    assert torch.equal(grad_x, torch.zeros_like(grad_x)) and torch.equal(grad_weight, torch.zeros_like(grad_weight))
    bias = leaves[2].detach().double().expand(shape[0], -1).requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.silu(bias), bias, grad.flatten(1).double())
    torch.testing.assert_close(grad_bias, want.sum(0).to(dtype))


@pytest.mark.parametrize("shape", [(2, 8, 4, 8), (2, 8, 64, 64)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_without_weight_or_bias(device, shape, activation):
    x, weight, bias = inputs(shape, torch.float32, device)
    grad = torch.randn_like(x)
    for w, b in ((weight, None), (None, bias), (None, None)):
        leaves = [t.clone().requires_grad_() for t in (x, w, b) if t is not None]

        def run(function, missing):
            given = iter(leaves)
            affine = [missing if t is None else next(given) for t in (x, w, b)]
            y = function(affine[0], 2, *affine[1:], activation=activation)
            return torch.autograd.grad(y, leaves, grad)

        # With a bias and no weight ATen's backward of torch 2.11 fails.
        want = run(reference, torch.ones_like(weight) if w is None and b is not None else None)
        torch.testing.assert_close(run(group_norm_act, None), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3), (0, 6)])
def test_nothing(device, shape):
    leaves = [t.requires_grad_() for t in inputs(shape, torch.float32, device)]
    y = group_norm_act(leaves[0], 2, *leaves[1:], activation="silu")
    for gradient, leaf in zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_what_is_wanted(device):
    """Any choice of the three gradients, in the dtypes of what they are of."""
    tensors = inputs((2, 8, 5), torch.float16, device)
    for wanted in range(1, 8):
        leaves = [t.detach().requires_grad_(bool(wanted & (1 << i))) for i, t in enumerate(tensors)]
        group_norm_act(leaves[0], 2, *leaves[1:], activation="relu").sum().backward()
        for leaf in leaves:
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or leaf.grad.dtype == torch.float16


def test_other_layouts(device):
    x, weight, bias = inputs((2, 8, 6, 8), torch.float64, device)
    for view in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, 1:]):
        leaves = [t.detach().requires_grad_() for t in (view, weight, bias)]
        grad = torch.randn(view.shape, dtype=x.dtype, device=device)
        for g in (grad, grad.mT.contiguous().mT, grad[..., :1].expand(view.shape)):
            got, want = (
                torch.autograd.grad(f(leaves[0], 2, *leaves[1:], activation="gelu"), leaves, g)
                for f in (group_norm_act, reference)
            )
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_misaligned_pointers(device, dtype):
    shape = (2, 8, 4, 8)
    x, grad = (torch.randn(2 * 8 * 32 + 1, device=device).to(dtype)[1:].view(shape) for _ in range(2))
    weight, bias = torch.randn(2, 9, device=device).to(dtype)[:, 1:]
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    got = torch.autograd.grad(group_norm_act(x, 2, weight, bias, activation="silu"), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(reference(wide[0], 2, *wide[1:], activation="silu"), wide, grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(60, 64, 16, 16), (2, 8, 100, 100)])
def test_the_same_at_every_call(device, shape):
    leaves = [t.requires_grad_() for t in inputs(shape, torch.float32, device)]
    first, second = (
        torch.autograd.grad(group_norm_act(leaves[0], 4, *leaves[1:], activation="silu").square().sum(), leaves)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_stays_in_its_group(device):
    x, weight, bias = inputs((2, 8, 4, 4), torch.float32, device)
    x[0, 0, 1, 1] = float("nan")
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = group_norm_act(leaves[0], 2, *leaves[1:], activation="silu")
    grad_x, grad_weight, _ = torch.autograd.grad(y.sum(), leaves)
    assert grad_x[0, :4].isnan().all() and not grad_x[0, 4:].isnan().any() and not grad_x[1].isnan().any()
    assert grad_weight[:4].isnan().all() and not grad_weight[4:].isnan().any()


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gradcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for shape in ((2, 4, 3), (3, 4)):
        leaves = [t.requires_grad_() for t in inputs(shape, torch.float64, device)]
        assert torch.autograd.gradcheck(lambda x, w, b: OPERATORS.group_norm_act(x, 2, w, b, 1e-5, code, 0.2), leaves)


@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "tanh"])
def test_gradgradcheck(device, activation):
    leaves = [t.requires_grad_() for t in inputs((2, 4, 3), torch.float64, device)]
    assert torch.autograd.gradgradcheck(lambda x, w, b: group_norm_act(x, 2, w, b, activation=activation), leaves)
    assert torch.autograd.gradgradcheck(lambda x: group_norm_act(x, 2, activation=activation), leaves[:1])


@pytest.mark.parametrize("activation", ["none", "silu", "tanh"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for requires_grad in (False, True):
        x, *affine = (t.requires_grad_(requires_grad) for t in inputs((2, 4, 3, 3), torch.float32, device))
        torch.library.opcheck(OPERATORS.group_norm_act_training.default, (x, 2, *affine, 1e-5, code, 0.01))
    x, *affine = inputs((2, 4, 3, 3), torch.float16, device)
    mean, rstd = torch.randn(4, device=device), torch.rand(4, device=device)
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        for given in (affine, [None, None]):
            torch.library.opcheck(
                OPERATORS.group_norm_act_backward.default, (x, layout, mean, rstd, *given, 2, code, 0.01)
            )


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_compositions(device, activation):
    """What other devices compute is what the kernels compute."""
    code = ops.ACTIVATIONS[activation].code
    for shape in ((2, 4, 3, 5), (3, 6), (0, 4, 3)):
        x, *affine = inputs(shape, torch.float64, device)
        grad = torch.randn_like(x)
        arguments = (x, 2, *affine, 1e-5, code, 0.2)
        got, want = OPERATORS.group_norm_act_training(*arguments), _compose_training(*arguments)
        torch.testing.assert_close(got, want)
        for given in (affine, [None, None]):
            arguments = (grad, x, *want[1:], *given, 2, code, 0.2)
            got, want_backward = OPERATORS.group_norm_act_backward(*arguments), _compose_backward(*arguments)
            torch.testing.assert_close(got, want_backward, rtol=1e-6, atol=1e-6)


def test_errors(device):
    x, weight, bias = inputs((4, 8, 2), torch.float32, device)
    mean, rstd = torch.zeros(8, device=device), torch.ones(8, device=device)
    for changed, match in (
        ({"grad": x[:2]}, "grad has shape"),
        ({"grad": x.double()}, "grad has another dtype than x"),
        ({"mean": mean[:4]}, "mean and rstd must have one element"),
        ({"rstd": rstd.double()}, "mean and rstd must have one element"),
        ({"num_groups": 3}, "8 channels do not make 3 groups"),
        ({"weight": weight[:5]}, "weight has shape"),
    ):
        arguments = {
            "grad": x, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias, "num_groups": 2, **changed,
        }  # fmt: skip
        with pytest.raises(RuntimeError, match=match) as error:
            OPERATORS.group_norm_act_backward(*arguments.values(), 0, 0.01)
        assert "\n" not in str(error.value)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.gpu_memory(30)
def test_more_than_2_31_elements(size):
    """Rows in registers, and longer ones."""
    images = 2**31 // (32 * size * size) + 2
    x, grad = torch.randn(2, 1, 32, size, size, device="cuda", dtype=torch.float16).repeat(1, images, 1, 1, 1)
    leaf = x.detach().requires_grad_()
    (got,) = torch.autograd.grad(group_norm_act(leaf, 32, activation="silu"), leaf, grad)
    last = x[-2:].detach().requires_grad_()
    (want,) = torch.autograd.grad(reference(last, 32, activation="silu"), last, grad[-2:])
    torch.testing.assert_close(got[-2:], want, atol=5e-3, rtol=5e-3)
