"""softmax and cross_entropy in plain ATen."""

import torch.nn.functional as F
from torch import Tensor

from ...ops.standalone.softmax import reference as softmax

__all__ = ["cross_entropy", "softmax"]


def cross_entropy(
    x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return F.cross_entropy(x, target, None, None, ignore_index, None, reduction, label_smoothing)
