"""quantized_linear: ``y = (x W^T) * scale`` with weights of int8 or float8 numbers, and a scale for each of their rows;
or ``act(g) * u`` of two such products g, u.

Plain ATen casts the whole weight in each call. On CUDA, a dedicated kernel computes up to 64 rows of a half type, as in
a step of generation or a short prompt, and reads only the quantized weight: once for each 16 rows. In a CUDA graph, it
reads the weight before earlier kernels have finished, so nothing in the graph may write to the weight.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..activations import BY_CODE
from ..registration import define, has_kernels, require

NUMBERS = (torch.int8, torch.float8_e4m3fn)
MOST_WEIGHTS = 3
_MOST_ROWS = 64
_HALF_TYPES = (torch.float16, torch.bfloat16)


def takes_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the CUDA kernel accepts x (..., in) and weight (out, in), whose memory is aligned."""
    if not x.is_cuda or x.dtype not in _HALF_TYPES or not has_kernels(x):
        return False
    in_words = weight.is_contiguous() and weight.shape[1] % 16 == 0 and weight.storage_offset() % 16 == 0
    return bool(in_words and 0 < x.numel() <= _MOST_ROWS * weight.shape[1])


def _compose(x, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], code, negative_slope, gated):
    name = "quantized_linear"
    fits = 0 < len(weights) <= MOST_WEIGHTS and len(weights) == len(scales) and (not gated or len(weights) == 2)
    require(fits, name, f"expected 1 to {MOST_WEIGHTS} weights, 2 with a gate, and a scale for each")
    products = []
    for weight, scale in zip(weights, scales):
        fits = weight.dim() == 2 and x.shape[-1] == weight.shape[1] and scale.numel() == weight.shape[0]
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, weight, scale))
        require(fits, name, f"x, weight and scale of shapes {shapes} do not fit")
        products.append(F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype).flatten())
    act = BY_CODE[code].reference
    if not gated:
        return act(torch.cat(products, -1), negative_slope).contiguous()
    require(products[0].shape == products[1].shape, name, "a gate and its factor have the same features")
    return (act(products[0], negative_slope) * products[1]).contiguous()


# x: (..., in); weights: (out, in) each, int8 or float8_e4m3fn; scales: out elements each. Returns (..., sum of out), or
# with a gate, (..., out). No gradients. On CUDA, raises RuntimeError for x and weights that ``takes_few_rows`` refuses.
quantized_linear = define(
    "quantized_linear(Tensor x, Tensor[] weights, Tensor[] scales, int activation, float negative_slope, bool gated) "
    "-> Tensor",
    _compose,
)
