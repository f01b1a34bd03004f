"""Statistics of series in plain ATen."""

import torch
from torch import Tensor


def sliding_window(x: Tensor, size: int, stride: int, reduce: str = "mean") -> Tensor:
    windows = x.unfold(-1, size, stride)
    if reduce == "std":
        return windows.std(-1, correction=0)
    return {"mean": windows.mean, "sum": windows.sum, "max": windows.amax, "min": windows.amin}[reduce](-1)


def sliding_window_mean_std(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(x.unfold(-1, window, 1), -1, correction=0)
    return mean, std
