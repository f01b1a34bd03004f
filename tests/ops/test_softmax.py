"""softmax of scaled and masked scores against plain ATen."""

import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator

from kfconvert import extension, ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
SHAPES = [
    (1,), (7,), (3, 33), (5, 128), (4, 1024), (3, 1025), (2, 4096), (3, 9000), (2, 40_000), (300, 64), (2, 3, 5, 17),
    (0, 8), (8, 0),
]  # fmt: skip
# Masks that broadcast with scores of shape (2, 3, 5, 16).
MASKS = [(2, 3, 5, 16), (2, 1, 5, 16), (2, 1, 1, 16), (5, 16), (16,), (2, 3, 5, 1), (1, 3, 1, 1), ()]


def scores(shape, dtype, device):
    return torch.randn(shape, device=device).mul(3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_aten(device, shape, dtype):
    x = scores(shape, dtype, device)
    check_operator(ops.softmax, reference.softmax, x)
    check_operator(ops.softmax, reference.softmax, x, scale=0.125)


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(device, dtype, shape):
    x = scores((2, 3, 5, 16), dtype, device)
    added = torch.randn(shape, device=device).to(dtype)
    check_operator(ops.softmax, reference.softmax, x, scale=0.3, mask=added)
    y = ops.softmax(x, scale=0.3, mask=added > -0.5)
    torch.testing.assert_close(y, reference.softmax(x, scale=0.3, mask=added > -0.5), equal_nan=True)


def test_long_rows_with_masks(device):
    x = scores((3, 2, 9000), torch.float32, device)
    for mask in (torch.rand(9000, device=device) > 0.3, torch.randn(3, 1, 9000, device=device)):
        torch.testing.assert_close(ops.softmax(x, mask=mask), reference.softmax(x, mask=mask))


def test_a_mask_of_many_dimensions(device):
    x = scores((2, 3, 2, 3, 2, 3, 8), torch.float32, device)
    for shape in ((2, 1, 2, 1, 2, 1, 8), (2, 1, 2, 1, 2, 1, 1), (1, 3, 1, 3, 1, 3, 8)):
        mask = torch.randn(shape, device=device)
        torch.testing.assert_close(ops.softmax(x, mask=mask), reference.softmax(x, mask=mask))


@pytest.mark.parametrize("columns", [8, 500, 1024, 9000])
def test_special_values(device, columns):
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(6, columns, device=device)
    x[0, 1], x[1, 3], x[2, :], x[3, 2:] = nan, inf, -inf, -inf
    x[4, 0], x[5, :4] = 80000.0, torch.tensor([-inf, nan, 1.0, 0.0], device=device)
    torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_any_strides(device):
    base = scores((6, 10, 16), torch.float32, device)
    for view in (base.transpose(0, 1), base.transpose(1, 2), base[..., ::2], base[:, :, 1:9]):
        check_operator(ops.softmax, reference.softmax, view)
    mask = torch.randn(16, 10, device=device).t()
    check_operator(ops.softmax, reference.softmax, base, mask=mask)


def test_other_dimensions(device):
    x = scores((4, 6, 8), torch.float32, device)
    for dim in (0, 1, 2, -2):
        check_operator(ops.softmax, reference.softmax, x, dim=dim, scale=0.5)
    assert ops.softmax(x[0, 0, 0]).item() == 1


@pytest.mark.parametrize("shape", [(3, 8, 6), (4, 1000), (2, 9001)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype, shape):
    x, mask = scores(shape, dtype, device), torch.randn(shape[-1], device=device).to(dtype)
    weights = [torch.randn(shape, device=device).to(dtype)]

    def of(function):
        return lambda x, mask: function(x, scale=0.5, mask=mask)

    check_gradients(of(ops.softmax), of(reference.softmax), [x, mask], weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rows_without_an_element(device, dtype):
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]], device=device)
    grads = []
    for package in (ops, reference):
        x = torch.arange(18, device=device).reshape(2, 3, 3).sin().to(dtype).requires_grad_()
        y = package.softmax(x, scale=0.5, mask=mask).masked_fill(~mask, 0)
        grads += torch.autograd.grad(y, x, torch.arange(18, device=device).reshape(2, 3, 3).to(dtype))
    assert (grads[0][:, 1] == 0).all() and (grads[0][:, ~mask] == 0).all()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_boolean_masks(device, dtype, shape):
    mask = torch.rand(shape, device=device) > 0.3
    for columns in (16, 15):
        x = scores((2, 3, 5, 16), dtype, device)[..., :columns]
        of_columns = mask if mask.dim() == 0 or mask.shape[-1] == 1 else mask[..., :columns]
        weights = [torch.randn(x.shape, device=device).to(dtype)]
        functions = [
            lambda x, of=package.softmax: of(x, scale=0.3, mask=of_columns)  # noqa: B023
            for package in (ops, reference)
        ]
        check_gradients(*functions, [x], weights)


@pytest.mark.parametrize("columns", [64, 200, 1000, 1024, 4096, 9000, 20_000, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_rows_with_boolean_masks(device, dtype, columns):
    x = scores((24, columns), dtype, device)
    many = torch.rand(24, columns + 3, device=device) > 0.3
    for mask in (many[:, :columns].contiguous(), many[:, 1 : columns + 1], many[0, 2 : columns + 2]):
        functions = [
            lambda x, of=package.softmax: of(x, scale=0.3, mask=mask)  # noqa: B023
            for package in (ops, reference)
        ]
        check_gradients(*functions, [x], [torch.randn_like(x)])


@pytest.mark.parametrize("columns", [8, 37, 5000, 20_000])
def test_special_gradients_with_boolean_masks(device, columns):
    """Where the mask is False the gradient is 0, but a gradient there that is not finite is one of the row's."""
    inf, nan = float("inf"), float("nan")
    mask = torch.rand(6, columns, device=device) > 0.4
    mask[:, 1], mask[:, 2], mask[5] = False, True, False
    grad = torch.randn(6, columns, device=device)
    grad[0, 1], grad[1, 1], grad[2, 2], grad[3, 2] = inf, nan, nan, inf
    grads = []
    for package in (ops, reference):
        x = torch.linspace(-3, 3, 6 * columns, device=device).reshape(6, columns)
        x[4, 2] = nan
        x.requires_grad_()
        grads += torch.autograd.grad(package.softmax(x, scale=0.5, mask=mask), x, grad)
    assert (grads[0][~mask] == 0).all() and grads[0][:5, 2].isnan().all()
    torch.testing.assert_close(*grads, equal_nan=True)


def test_gradcheck(device):
    x, mask = (t.requires_grad_() for t in (scores((3, 5), torch.float64, device), torch.randn(5).double().to(device)))
    assert torch.autograd.gradcheck(lambda x, mask: ops.softmax(x, scale=0.7, mask=mask), (x, mask))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: ops.softmax(x, scale=0.7, mask=mask.detach() > 0), (x,))


def test_opcheck(device):
    x = scores((3, 8), torch.float32, device)
    for mask in (None, x[0] > 0, x[1].clone()):
        for requires_grad in (False, True):
            leaf = x.clone().requires_grad_(requires_grad)
            torch.library.opcheck(OPERATORS.softmax.default, (leaf, mask, 0.5))
    for dtype in DTYPES:
        for mask in (None, x > 0, x[0] > 0, x[:, :1] > 0):
            y = torch.softmax(x.to(dtype), -1)
            torch.library.opcheck(OPERATORS.softmax_backward.default, (x.to(dtype), y, mask, 0.5))


def test_autocast_and_compile(device, compiled):
    x = scores((4, 8), torch.bfloat16, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ops.softmax(x).dtype is torch.softmax(x, -1).dtype
    module = torch.compile(lambda x: ops.softmax(x, scale=2.0), backend="aot_eager", fullgraph=True)
    for rows in (2, 3):
        torch.testing.assert_close(module(x[:rows].float()), torch.softmax(x[:rows].float() * 2, -1))


def test_errors(device, compiled):
    x = scores((4, 8), torch.float32, device)
    with pytest.raises(IndexError, match="dim 2 is out of range"):
        ops.softmax(x, 2)
    for options, match in (
        ({"mask": x[:, :3]}, r"mask of shape \(4, 3\) does not broadcast to \(4, 8\)"),
        ({"mask": x[None]}, r"mask of shape \(1, 4, 8\) does not broadcast"),
        ({"mask": x.double()}, "mask must be boolean or have the dtype of x"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.softmax(x, **options)
    with pytest.raises(RuntimeError, match="expected float64, float32, float16 or bfloat16"):
        ops.softmax(x.int())


def test_errors_of_the_backward(device):
    x = scores((4, 8), torch.float32, device)
    for mask, match in ((x, "mask must be boolean"), (x[:, :3] > 0, "does not broadcast")):
        with pytest.raises(RuntimeError, match=match):
            OPERATORS.softmax_backward(x, x, mask, 1.0)


def test_other_names(device, monkeypatch):
    x = scores((4, 8), torch.float32, device)
    assert torch.equal(ops.SoftMaxOp.apply(x, -1), ops.softmax(x))
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", True)
    assert isinstance(ops.get_cuda_softmax(), ops.SoftMaxOp)
    assert torch.equal(ops.get_cuda_softmax()(x, -1, 0.5), ops.softmax(x, -1, 0.5))
    monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", False)
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        ops.get_cuda_softmax()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 33), (5,), (0, 4), (70, 3000)])
def test_halves(device, dtype, shape):
    x, grad = (torch.randn(shape, device=device).to(dtype) for _ in "xg")
    op = ops.SoftMaxOp()
    y = check_operator(op.forward, lambda x: torch.softmax(x, -1), x)
    check_operator(op.backward, lambda g, y: torch.ops.aten._softmax_backward_data(g, y, -1, y.dtype), grad, y)


def test_halves_of_a_module(device):
    class Doubled:
        forward = staticmethod(lambda x: 2 * x)
        backward = staticmethod(lambda grad, output: grad + output)

    x, op = scores((4, 8), torch.float32, device), ops.SoftMaxOp(Doubled)
    assert torch.equal(op.forward(x), 2 * x) and torch.equal(op.backward(x, x), 2 * x)
    with pytest.raises(TypeError, match="^kfconvert::softmax: scale must be a number, got dtype$"):
        op.apply(x, -1, torch.float32)
    with pytest.raises(TypeError, match="^kfconvert::softmax: module must have forward and backward, got int$"):
        ops.SoftMaxOp(3)


def test_errors_of_halves(device, compiled):
    x, op = scores((4, 8), torch.float32, device), ops.SoftMaxOp()
    for call, match in (
        (lambda: op.backward(x[:2], x), "do not fit"),
        (lambda: op.backward(x.double(), x), "grad has another dtype than output"),
        (lambda: op.backward(x[0, 0], x[0, 0]), "do not fit"),
        (lambda: op.forward(x.int()), "expected float64"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.cuda
@pytest.mark.gpu_memory(20)
def test_more_elements_than_32_bits_count():
    x = torch.zeros(2**31 // 4096 + 3, 4096, device="cuda", dtype=torch.float16)
    x[-1, 7] = float("inf")
    x[-2, 7] = 20
    y = ops.softmax(x)
    assert y[-1].isnan().all() and y[-2, 7] > 0.99 and torch.equal(y[0], torch.softmax(x[0], -1))
