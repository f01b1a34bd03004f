"""Statistics of series: sliding windows over the last dimension."""

from collections.abc import Callable

import torch

from ..declaration import declare
from ..registration import require, require_float

__all__ = ["sliding_window", "sliding_window_mean_std"]


@declare(group="series", example=lambda t, rows, columns: (t(rows, 9), 3, 2), runs="PyTorch's reductions")
def sliding_window(x: torch.Tensor, size: int, stride: int, reduce: str = "mean") -> torch.Tensor:
    """Reduces windows of ``size`` values of the last dimension, one every ``stride`` values: ``x.unfold(-1, size,
    stride)``, a view, and PyTorch's reduction of its last dimension.

    Args:
        x: (..., L), any strides; float64, float32, float16 or bfloat16.
        size: window size, from 1 to L.
        stride: distance between the starts of windows, 1 or more.
        reduce: "mean", "sum", "max", "min", or "std" (population, see :func:`sliding_window_mean_std`).

    Returns:
        (..., (L - size) // stride + 1), in x's dtype. The result of a window with NaN is NaN. For "max" and "min",
        equal values share the gradient.

    Raises:
        RuntimeError: an invalid x, size or stride. ValueError: another ``reduce``.
    """
    operator = "sliding_window"
    if reduce not in (*_REDUCTIONS, "std"):
        raise ValueError(f"kfconvert::{operator}: reduce must be mean, sum, max, min or std, got {reduce!r}")
    _check_windows(operator, x, "size", size, stride)
    if reduce == "std":
        return _std_mean(x, size, stride)[0]
    return _REDUCTIONS[reduce](x.unfold(-1, size, stride), -1)


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@declare(group="series", example=lambda t, rows, columns: (t(rows, 9), 3), runs="torch.std_mean")
def sliding_window_mean_std(x: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mean and standard deviation of every ``window`` consecutive values of the last dimension.

    This is the population standard deviation, sqrt(mean((x - mean)^2)): exactly 0, with a gradient of 0, if all
    values of a window are equal. ``torch.std_mean`` over the view ``x.unfold`` reads each window separately, which
    avoids the cancellation of cumulative sums in series far from 0. The time is O(L * window), and the backward
    needs memory for all values of all windows.

    Args:
        x: (..., L), any strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32 on the CPU, and these and float32 in float64 on CUDA).
        window: from 1 to L.

    Returns:
        mean, std: both (..., L - window + 1), in x's dtype.

    Raises:
        RuntimeError: an invalid x or window.
    """
    _check_windows("sliding_window_mean_std", x, "window", window, 1)
    std, mean = _std_mean(x, window, 1)
    return mean, std


def _check_windows(operator, x, name, size, stride):
    require_float(operator, x)
    require(x.dim() >= 1, operator, "x has no dimension")
    require(1 <= size <= x.shape[-1], operator, lambda: f"{name} must be between 1 and {x.shape[-1]}, got {size}")
    require(stride >= 1, operator, lambda: f"stride is {stride}, expected 1 or more")


def _std_mean(x, size, stride):
    if x.numel() == 0:  # std_mean warns of it
        empty = x.unfold(-1, size, stride)[..., 0]
        return empty.clone(), empty.clone()
    # On CUDA, ATen computes deviations of half types and float32 in float32, which loses all digits far from 0.
    wide = x.double() if x.is_cuda else x
    std, mean = torch.std_mean(wide.unfold(-1, size, stride), -1, correction=0)
    return std.to(x.dtype), mean.to(x.dtype)
