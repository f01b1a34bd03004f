"""Sliding windows against torch.std_mean of each window in float64."""

import pytest
import torch
from helpers import DTYPES, assert_as_accurate, assert_gradients_as_accurate, assert_one_graph

from kfconvert.kernels.reference import sliding_window_mean_std as reference
from kfconvert.ops import sliding_window_mean_std

pytestmark = pytest.mark.filterwarnings("ignore:std_mean")  # by the definition, of no values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (3, 600), (2, 3, 200), (0, 40), (5000,)])
def test_as_accurate_as_aten(device, dtype, shape):
    x = torch.randn(shape, device=device).mul(3).add(1).to(dtype)
    for window in (1, 2, 7, 40):
        results = assert_as_accurate(sliding_window_mean_std, reference, x, window)
        assert all(result.shape == (*shape[:-1], shape[-1] - window + 1) for result in results)


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
        assert_as_accurate(sliding_window_mean_std, reference, x, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    x = torch.randn(3, 40, device=device).to(dtype)
    for window in (1, 2, 7, 40):
        weights = [torch.randn(3, 41 - window, device=device).to(dtype) for _ in range(2)]
        assert_gradients_as_accurate(
            lambda x: sliding_window_mean_std(x, window), lambda x: reference(x, window), [x], weights
        )


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
