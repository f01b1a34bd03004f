"""Statistics of series in plain ATen."""

import torch
from torch import Tensor


def sliding_window_mean_std(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    std, mean = torch.std_mean(x.unfold(-1, window, 1), -1, correction=0)
    return mean, std
