"""Reductions against plain ATen: dimensions, layouts, many elements, special values, gradients, errors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.standalone.reduce import Term

OVER_DIMS = ["reduce_sum_squared", "reduce_mean_abs"]


def laid_out(x, layout):
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_elements(device, dtype):
    """50 M with few distinct values: what rounding does is the same again and again, and does not cancel."""
    x = torch.tensor([0.01, 0.013, 0.7, -0.3], device=device).to(dtype).repeat(12_500_001)
    mean = ops.reduce_mean_abs(x)
    want = x[:4].double().abs().mean()
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(mean.double(), want, rtol=max(1e-6, ulp), atol=0)
    loss = ops.mse_loss(x, torch.full_like(x, 0.25))
    want = (x[:4].double() - 0.25).square().mean()
    torch.testing.assert_close(loss.double(), want, rtol=max(1e-6, ulp), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1.0], [inf, 1.0], [-inf, 1.0], [inf, nan], [inf, -inf], [0.0, -0.0], [60000.0, 60000.0]]
    x = torch.tensor(rows, device=device, dtype=dtype)
    for columns in (2, 1024):
        wide = F.pad(x, (0, columns - 2))
        for name in OVER_DIMS:
            got, want = (getattr(package, name)(wide, -1) for package in (ops, reference))
            torch.testing.assert_close(got[:6], want[:6], equal_nan=True)
        assert ops.reduce_mean_abs(wide, -1)[6].isfinite()
    for other in (x, torch.zeros_like(x)):
        want = reference.mse_loss(x[:6], other[:6])
        torch.testing.assert_close(ops.mse_loss(x[:6], other[:6]), want, equal_nan=True)


def test_half_types_do_not_overflow_on_the_way(device):
    x = torch.full((4, 4096), 300.0, device=device, dtype=torch.float16)
    assert torch.equal(ops.reduce_mean_abs(x, -1), x[:, 0])
    assert ops.mse_loss(x, x - 250.0) == 62500.0


@pytest.mark.parametrize("of", [int, np.int64, torch.tensor])
def test_dimensions_as_any_integers(device, compiled, of):
    x = torch.randn(4, 6, 8, device=device)
    for name in OVER_DIMS:
        operator, definition = (getattr(package, name) for package in (ops, reference))
        for dim in (0, 1, -1):
            torch.testing.assert_close(operator(x, of(dim)), definition(x, dim))
        torch.testing.assert_close(operator(x, (of(0), of(-1))), definition(x, (0, -1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(device, compiled, requires_grad, dtype):
    x, y = (torch.randn(4, 100, device=device).to(dtype).requires_grad_(requires_grad) for _ in "xy")
    with torch.autocast(device, dtype=torch.bfloat16):
        for function, arguments in (
            ("reduce_sum_squared", (x, -1)),
            ("reduce_mean_abs", (x, -1)),
            ("mse_loss", (x, y)),
            ("mse_loss", (x, y.detach().float())),
            ("mse_loss", (x, y[0])),
        ):
            got, want = (getattr(package, function)(*arguments) for package in (ops, reference))
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
            if requires_grad:
                grads = [torch.autograd.grad(result.sum(), x)[0] for result in (got, want)]
                torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize(("layout", "dynamic"), [("channels_last", None), ("strided", True)])
def test_compile_with_any_strides(device, layout, dynamic):
    def function(x, y):
        return ops.mse_loss(x, y), ops.reduce_sum_squared(x, 1), ops.reduce_mean_abs(x, (1, 2), keepdim=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.compiler.reset()
    for shape in ((2, 3, 4, 4), (5, 3, 6, 7), (4, 8, 5, 2)):
        x = laid_out(torch.randn(shape, device=device), layout)
        torch.testing.assert_close(compiled(x, x + 1), function(x, x + 1))


def test_equal_results_for_any_number_of_threads():
    x = torch.randn(3, 200_001)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((ops.reduce_sum_squared(x), ops.reduce_mean_abs(x, -1), ops.mse_loss(x, x + 1)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


OPERATORS = torch.ops.kfconvert
BACKWARD = OPERATORS.reduce_rows_backward.default


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
def test_special_values_of_gradients(device, dtype):
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


def test_half_types_do_not_overflow_on_the_way_of_gradients(device):
    x = torch.full((4, 8), 1e-3, device=device, dtype=torch.float16)
    (of_x, _) = BACKWARD(torch.full((4,), 60000.0, device=device).half(), x, None, 1, Term.SQUARE, False, False)
    torch.testing.assert_close(of_x, torch.full_like(x, 120.0), rtol=2e-3, atol=0)


def test_one_tensor_as_both(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    ops.mse_loss(x, x).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_equal_results_for_any_number_of_threads_of_gradients():
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
