"""Sliding windows against torch.std_mean of each window in float64."""

import pytest
import torch
from helpers import DTYPES, assert_one_graph, check_gradients, check_operator

from kfconvert.kernels import reference as references
from kfconvert.kernels.reference import sliding_window_mean_std as reference
from kfconvert.ops import sliding_window, sliding_window_mean_std

REDUCTIONS = ("mean", "sum", "max", "min", "std")

pytestmark = pytest.mark.filterwarnings("ignore:std_mean")  # by the definition, of no values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (3, 600), (2, 3, 200), (0, 40), (5000,)])
def test_as_accurate_as_aten(device, dtype, shape):
    x = torch.randn(shape, device=device).mul(3).add(1).to(dtype)
    for window in (1, 2, 7, 40):
        results = check_operator(sliding_window_mean_std, reference, x, window)
        assert all(result.shape == (*shape[:-1], shape[-1] - window + 1) for result in results)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(device, dtype, reduce):
    for shape in ((40,), (3, 600), (2, 3, 200), (0, 40)):
        x = torch.randn(shape, device=device).mul(3).add(1).to(dtype)
        for size, stride in ((1, 1), (7, 2), (5, 9), (40, 1)):
            y = check_operator(sliding_window, references.sliding_window, x, size, stride, reduce)
            assert y.shape == (*shape[:-1], (shape[-1] - size) // stride + 1)
    x = torch.randn(3, 40, device=device).to(dtype)
    y = sliding_window(x, 6, 4, reduce)
    check_gradients(
        lambda x: sliding_window(x, 6, 4, reduce),
        lambda x: references.sliding_window(x, 6, 4, reduce),
        [x],
        [torch.randn_like(y)],
    )


def test_reductions_are_those_of_pooling(device):
    x = torch.randn(2, 3, 50, device=device)
    pool = torch.nn.functional
    torch.testing.assert_close(sliding_window(x, 5, 3), pool.avg_pool1d(x, 5, 3))
    torch.testing.assert_close(sliding_window(x, 5, 3, "sum"), 5 * pool.avg_pool1d(x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 3, "max"), pool.max_pool1d(x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 3, "min"), -pool.max_pool1d(-x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 1, "std"), sliding_window_mean_std(x, 5)[1])


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions_differentiated_compiled_and_of_nan(device, reduce):
    x = torch.randn(2, 9, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sliding_window(x, 4, 2, reduce), x)
    inputs = [torch.randn(2, length, device=device) for length in (18, 19, 20)]
    assert_one_graph(lambda x: sliding_window(x, 3, 2, reduce), inputs)
    x = torch.randn(20, device=device)
    x[7] = float("nan")
    assert sliding_window(x, 4, 4, reduce).isnan().tolist() == [False, True, False, False, False]


def test_errors_of_reductions(device):
    x = torch.randn(3, 8, device=device)
    for arguments, error, message in (
        ((x, 9, 1), RuntimeError, "size 9 is not in 1 to 8"),
        ((x, 0, 1), RuntimeError, "size 0 is not in 1 to 8"),
        ((x, 3, 0), RuntimeError, "stride is 0, expected 1 or more"),
        ((x, 3, 1, "median"), ValueError, "reduce must be mean, sum, max, min or std, got 'median'"),
        ((x[0, 0], 1, 1), RuntimeError, "x has no dimension"),
        ((x.long(), 2, 1), RuntimeError, "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(error, match=message) as caught:
            sliding_window(*arguments)
        assert "\n" not in str(caught.value)


def test_far_from_zero(device):
    """Differences of cumulative sums in float32 would have no digit left."""
    x = torch.randn(2, 400, device=device).add(10_000)
    mean, std = sliding_window_mean_std(x, 20)
    want_mean, want_std = reference(x.double(), 20)
    torch.testing.assert_close(mean, want_mean.float(), rtol=2e-7, atol=0)
    torch.testing.assert_close(std, want_std.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values(device, dtype):
    x = torch.full((8, 300), 0.1, device=device, dtype=dtype)
    x[:, 100] = 1e4
    x.requires_grad_()
    mean, std = sliding_window_mean_std(x, 7)
    equal = torch.arange(294, device=device)
    equal = (equal > 100) | (equal < 94)
    assert (std[:, equal] == 0).all() and (mean[:, equal] == x[0, 0]).all()
    assert (std[:, ~equal] > 1).all()
    (grad,) = torch.autograd.grad(std.sum(), x)
    assert grad.isfinite().all() and (grad[:, 110:] == 0).all()


def test_layouts(device):
    x = torch.randn(600, 8, device=device)
    for x in (x.t(), x[:, ::2].t(), x.view(8, 600)[:, ::2], x[:, 0].expand(4, 600), x[:, :1].expand(600, 40)):
        check_operator(sliding_window_mean_std, reference, x, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    x = torch.randn(3, 40, device=device).to(dtype)
    for window in (1, 2, 7, 40):
        weights = [torch.randn(3, 41 - window, device=device).to(dtype) for _ in range(2)]
        check_gradients(lambda x: sliding_window_mean_std(x, window), lambda x: reference(x, window), [x], weights)


def test_gradcheck(device):
    x = torch.randn(2, 9, device=device, dtype=torch.float64, requires_grad=True)
    for window in (2, 4):
        assert torch.autograd.gradcheck(lambda x: sliding_window_mean_std(x, window), x)
    empty = torch.randn(0, 9, device=device, requires_grad=True)
    assert torch.autograd.grad(sliding_window_mean_std(empty, 3)[1].sum(), empty)[0].shape == (0, 9)


def test_compile(device):
    compiled = torch.compile(sliding_window_mean_std, backend="aot_eager", fullgraph=True)
    for rows in (3, 4):
        x = torch.randn(rows, 100, device=device)
        torch.testing.assert_close(compiled(x, 8), sliding_window_mean_std(x, 8))


def test_autocast(device):
    x = torch.randn(3, 40, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(sliding_window_mean_std(x, 5), reference(x, 5))


def test_errors(device):
    x = torch.randn(3, 8, device=device)
    for arguments, message in (
        ((x, 0), "window 0 is not in 1 to 8"),
        ((x, 9), "window 9 is not in 1 to 8"),
        ((x[0, 0], 1), "x has no dimension"),
        ((x.long(), 2), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message) as error:
            sliding_window_mean_std(*arguments)
        assert "\n" not in str(error.value)


def test_one_graph_for_all_lengths(device):
    inputs = [torch.randn(2, length, device=device) for length in (8, 9, 10)]
    assert_one_graph(lambda x: sliding_window_mean_std(x, 3), inputs)
