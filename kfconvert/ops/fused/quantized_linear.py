"""quantized_linear: ``y = (x W^T) * scale`` with a weight of int8 or float8 numbers, and a scale for each of its rows.

Plain ATen casts the whole weight in each call. On CUDA, a dedicated kernel computes up to 16 rows of a half type, as in
a step of generation, and reads only the quantized weight. In a CUDA graph, it reads the weight before earlier kernels
have finished, so nothing in the graph may write to the weight.
"""

import torch
import torch.nn.functional as F

from ..registration import define, has_kernels, require

NUMBERS = (torch.int8, torch.float8_e4m3fn)
_MOST_ROWS = 16
_HALF_TYPES = (torch.float16, torch.bfloat16)


def takes_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the CUDA kernel accepts x (..., in) and weight (out, in)."""
    few = 0 < x.numel() <= _MOST_ROWS * weight.shape[1]
    return x.is_cuda and x.dtype in _HALF_TYPES and few and weight.shape[1] % 16 == 0 and has_kernels(x)


def check(x, weight, scale):
    """Raises RuntimeError unless the shapes of x, weight and scale match."""
    fits = weight.dim() == 2 and x.shape[-1] == weight.shape[1] and scale.numel() == weight.shape[0]
    shapes = ", ".join(str(tuple(each.shape)) for each in (x, weight, scale))
    require(fits, "quantized_linear", f"x, weight and scale of shapes {shapes} do not fit")


def _compose(x, weight, scale):
    check(x, weight, scale)
    return (F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype).flatten()).contiguous()


# x: (..., in); weight: (out, in), int8 or float8_e4m3fn; scale: out elements. Returns (..., out). No gradients.
# On CUDA, raises RuntimeError for x and weight that ``takes_few_rows`` refuses.
quantized_linear = define("quantized_linear(Tensor x, Tensor weight, Tensor scale) -> Tensor", _compose)
