"""Checks of the Triton kernels' arguments."""

import torch
import triton
from torch import Tensor

from ...ops.registration import require
from .launch import tile

INTERPRETED = not isinstance(tile, triton.JITFunction)


def require_forward(operator: str, *tensors: Tensor | None) -> None:
    """Raises a one-line RuntimeError for arguments that kfconvert.ops supports but the Triton kernels do not."""
    given = [tensor for tensor in tensors if tensor is not None]
    require(INTERPRETED or all(t.is_cuda for t in given), operator, "Triton needs CUDA tensors")
    wide = any(tensor.dtype == torch.float64 for tensor in given)
    require(not wide, operator, "the Triton kernels compute in float32 and do not support float64")
    cast = torch.is_autocast_enabled(given[0].device.type)
    require(not cast, operator, "the Triton kernels do not support autocast; kfconvert.ops does")
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    require(not learned, operator, "the Triton kernels are forward only; kfconvert.ops has the backward")
