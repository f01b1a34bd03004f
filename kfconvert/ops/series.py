"""Statistics of series: windows that slide over the last dimension."""

import torch

from .arguments import within
from .registration import require, require_float


def sliding_window_mean_std(x: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of every ``window`` neighbours of the last dimension.

    The standard deviation is the population's, sqrt(mean((x - mean)^2)): exactly 0, with a gradient of 0,
    where all values of a window are equal. ``torch.std_mean`` over ``x.unfold``, a view: it reads each window
    anew, so that nothing cancels in series far from 0, as would in differences of cumulative sums. So it
    takes time in O(L * window), and the backward needs memory for all values of all windows.

    Args:
        x: (..., L), any strides; float64, float32, float16 or bfloat16 (the half types are computed in
            float32 on the CPU, and these and float32 in float64 on CUDA).
        window: from 1 to L.

    Returns:
        mean, std: both (..., L - window + 1), in x's dtype.

    Raises:
        RuntimeError: an x or a window that does not fit.
    """
    operator = "sliding_window_mean_std"
    require_float(operator, x)
    require(x.dim() >= 1, operator, "x has no dimension")
    fits = within(operator, "window", 1, window, x.shape[-1])
    require(fits, operator, lambda: f"window {window} is not in 1 to {x.shape[-1]}")
    if x.numel() == 0:  # std_mean warns of it
        y = x[..., window - 1 :]
        return y.clone(), y.clone()
    # On CUDA ATen has the deviations of half types and float32 in float32, without digits far from 0.
    wide = x.double() if x.is_cuda else x
    std, mean = torch.std_mean(wide.unfold(-1, window, 1), -1, correction=0)
    return mean.to(x.dtype), std.to(x.dtype)
