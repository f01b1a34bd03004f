"""The gradients of reductions against plain ATen: rows of any length, layouts, special values, errors."""

import pytest
import torch
from helpers import DTYPES, check_gradients

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.standalone.reduce import Term

OPERATORS = torch.ops.kfconvert
BACKWARD = OPERATORS.reduce_rows_backward.default
OVER_DIMS = ["reduce_sum_squared", "reduce_mean_abs"]
# (shape, dimensions)
CASES = [
    ((7,), None), ((5, 7), -1), ((5, 7), 0), ((300, 8), 1), ((300, 33), -1), ((70, 64), (1,)), ((9, 1025), -1),
    ((3, 4, 5, 6), (2, 3)), ((3, 4, 5, 6), (0, 2)), ((3, 1, 5, 1), (1, 2)), ((2, 40_001), 1), ((70_003,), None),
    ((40_000, 1), 1),
]  # fmt: skip


def of(package, name, **arguments):
    return lambda *tensors: getattr(package, name)(*tensors, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OVER_DIMS)
def test_rows_of_any_length(device, name, dtype):
    for shape, dim in CASES:
        x = torch.randn(shape, device=device).to(dtype)
        functions = [of(package, name, dim=dim) for package in (ops, reference)]
        weights = [torch.randn(functions[1](x).shape, device=device).to(dtype)]
        check_gradients(*functions, [x], weights)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_elements(device, dtype, reduction):
    for shape in ((), (1,), (7,), (9, 1025), (4, 1024), (70_003,)):
        tensors = [torch.randn(shape, device=device).to(dtype) for _ in "xy"]
        functions = [of(package, "mse_loss", reduction=reduction) for package in (ops, reference)]
        check_gradients(*functions, tensors, [torch.tensor(1.5, device=device, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_pointers(device, dtype):
    x, y = (torch.randn(8 * 512 + 1, device=device).to(dtype)[1:].view(8, 512) for _ in "xy")
    grad = torch.randn(8, device=device, dtype=dtype)
    for other, term in ((None, Term.SQUARE), (None, Term.MAGNITUDE), (y, Term.SQUARED_DIFFERENCE)):
        aligned = [None if tensor is None else tensor.clone() for tensor in (x, other)]
        got, want = (BACKWARD(grad, *tensors, 1, term, True, False)[0] for tensors in ((x, other), aligned))
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided", "rows of more", "repeated"])
def test_layouts(device, layout):
    x = torch.randn(2, 8, 6, 10, device=device, dtype=torch.float64)
    laid_out = {
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(-1, -2),
        "strided": x[..., ::2],
        "rows of more": x[..., :7],
        "repeated": x[:, :1].expand(2, 8, 6, 10),
    }[layout]
    leaf = laid_out.detach().requires_grad_()
    for dim in (None, 1, 3, (1, 3), (2, 3), (0, 1, 2)):
        for name in OVER_DIMS:
            grads = []
            for package in (ops, reference):
                result = getattr(package, name)(leaf, dim)
                grad = torch.arange(result.numel(), device=device, dtype=leaf.dtype).reshape(result.shape)
                grads += torch.autograd.grad(result, leaf, grad)
            torch.testing.assert_close(*grads)
    other = torch.randn_like(laid_out).requires_grad_()
    pairs = [torch.autograd.grad(package.mse_loss(leaf, other), (leaf, other)) for package in (ops, reference)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_layout_and_precision(device, dtype):
    """That of the result may be repeated, strided, and wider than x."""
    x = torch.randn(6, 4, 10, device=device).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for grad in (
        torch.ones((), device=device).expand(6, 4),
        torch.randn(6, 1, device=device).expand(6, 4),
        torch.randn(4, 6, device=device).t(),
        torch.randn(6, 8, device=device)[:, ::2],
    ):
        for given in (grad.to(dtype), grad.to(wide)):
            for term in (Term.SQUARE, Term.MAGNITUDE):
                (got, none), (want, _) = (
                    backward(given, x, None, 1, term, True, False)
                    for backward in (BACKWARD, ops.standalone.reduce._compose_backward)
                )
                assert got.dtype == dtype and none.shape == (0,)
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    nan, inf = float("nan"), float("inf")
    special = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -2.0, 60000.0], device=device, dtype=dtype)
    x, grad = torch.cartesian_prod(special, special).t().contiguous()
    for columns in (1, 8):
        rows = x[:, None].repeat(1, columns)
        for name in OVER_DIMS:
            grads = []
            for package in (ops, reference):
                leaf = rows.clone().requires_grad_()
                grads += torch.autograd.grad(getattr(package, name)(leaf, 1), leaf, grad)
            torch.testing.assert_close(*grads, equal_nan=True)
    grads = []
    for package in (ops, reference):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, grad)]
        grads.append(torch.autograd.grad(package.mse_loss(*leaves, "sum"), leaves))
    torch.testing.assert_close(*grads, equal_nan=True)


def test_half_types_do_not_overflow_on_the_way(device):
    x = torch.full((4, 8), 1e-3, device=device, dtype=torch.float16)
    (of_x, _) = BACKWARD(torch.full((4,), 60000.0, device=device).half(), x, None, 1, Term.SQUARE, False, False)
    torch.testing.assert_close(of_x, torch.full_like(x, 120.0), rtol=2e-3, atol=0)


def test_no_elements(device):
    for shape, dims in (((0, 8), 1), ((8, 0), 1), ((0,), 1), ((0, 8), 2)):
        x = torch.empty(shape, device=device)
        grad = torch.ones(shape[: len(shape) - dims], device=device)
        of_x, of_other = BACKWARD(grad, x, x, dims, Term.SQUARED_DIFFERENCE, True, True)
        assert of_x.shape == of_other.shape == shape


def test_one_tensor_as_both(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    ops.mse_loss(x, x).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_gradients_of_gradients_are_those_of_aten(device):
    x, y = (torch.randn(3, 8, device=device, dtype=torch.float64, requires_grad=True) for _ in "xy")
    found = []
    for package in (ops, reference):
        grads = torch.autograd.grad(package.mse_loss(x, y), (x, y), create_graph=True)
        found.append(torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), (x, y)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(device, dtype):
    x, y = (torch.randn(3, 4, 8, device=device).to(dtype) for _ in "xy")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for other, dims, term, mean, both in (
        (None, 1, Term.SQUARE, False, False),
        (None, 2, Term.MAGNITUDE, True, False),
        (y, 3, Term.SQUARED_DIFFERENCE, True, True),
        (y, 0, Term.SQUARED_DIFFERENCE, False, False),
    ):
        for grad_dtype in {dtype, wide}:
            grad = torch.randn(x.shape[: 3 - dims], device=device, dtype=grad_dtype)
            torch.library.opcheck(BACKWARD, (grad, x, other, dims, term, mean, both))


def test_errors(device):
    x = torch.randn(4, 8, device=device)
    rows = x[:, 0]
    for match, arguments in (
        ("cannot reduce 3 dimensions", (rows, x, None, 3, Term.SQUARE, False, False)),
        ("other belongs to differences only", (rows, x, x, 1, Term.SQUARE, False, False)),
        ("there is no other to have a gradient", (rows, x, None, 1, Term.SQUARE, False, True)),
        ("grad has neither the dtype of x nor", (rows.double(), x, None, 1, Term.SQUARE, False, False)),
        (r"grad has shape \(4, 8\), expected \(4\)", (x, x, None, 1, Term.SQUARE, False, False)),
    ):
        with pytest.raises(RuntimeError, match=match):
            BACKWARD(*arguments)


def test_equal_results_for_any_number_of_threads():
    x, y = torch.randn(3, 70_001), torch.randn(3, 70_001)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(BACKWARD(x[:, 0], x, y, 1, Term.SQUARED_DIFFERENCE, True, True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.cuda
@pytest.mark.gpu_memory(20)
def test_more_elements_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    x = torch.ones(rows, 4096, device="cuda", dtype=torch.float16)
    x[-1] = -3
    grad = torch.arange(rows, device="cuda", dtype=torch.float32).remainder_(7)
    for columns in (4096, 4095):
        of_x, _ = BACKWARD(grad, x[:, :columns].contiguous(), None, 1, Term.SQUARE, False, False)
        for row in (0, rows // 2, rows - 2, rows - 1):
            assert (of_x[row] == 2 * x[row, 0] * grad[row]).all()
        del of_x
    flat = x.view(-1)
    of_x, _ = BACKWARD(grad[1], flat, None, 1, Term.MAGNITUDE, False, False)
    assert (of_x[-4096:] == -1).all() and (of_x[:-4096].view(-1, 4096)[:: rows // 5] == 1).all()
