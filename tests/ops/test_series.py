"""Sliding windows against torch.std_mean of each window in float64."""

import pytest
import torch
from helpers import DTYPES

from kfconvert.kernels.reference import sliding_window_mean_std as reference
from kfconvert.ops import sliding_window, sliding_window_mean_std

pytestmark = pytest.mark.filterwarnings("ignore:std_mean")  # by the definition, of no values


def test_reductions_are_those_of_pooling(device):
    x = torch.randn(2, 3, 50, device=device)
    pool = torch.nn.functional
    torch.testing.assert_close(sliding_window(x, 5, 3), pool.avg_pool1d(x, 5, 3))
    torch.testing.assert_close(sliding_window(x, 5, 3, "sum"), 5 * pool.avg_pool1d(x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 3, "max"), pool.max_pool1d(x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 3, "min"), -pool.max_pool1d(-x, 5, 3))
    assert torch.equal(sliding_window(x, 5, 1, "std"), sliding_window_mean_std(x, 5)[1])


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
