"""skinny_linear: ``y = act(x W^T + b)`` for a few rows of x, or ``act(g) * u`` with the halves g, u of ``x W^T + b``.

On CUDA, a dedicated kernel computes up to 16 rows of a half type, as in a step of generation, at memory bandwidth. The
library computes all other cases. In a CUDA graph, the kernel reads the weight before earlier kernels have finished, so
nothing in the graph may write to the weight.
"""

import torch
import torch.nn.functional as F

from ..activations import BY_CODE
from ..registration import define, has_kernels, require
from .linear_act import check

_MOST_ROWS = 16
_HALF_TYPES = (torch.float16, torch.bfloat16)


def takes_skinny(x: torch.Tensor, in_features: int) -> bool:
    """Whether the kernel accepts x (..., in_features). It does not accept all layouts of weights."""
    few = 0 < x.numel() <= _MOST_ROWS * in_features
    return x.is_cuda and x.dtype in _HALF_TYPES and few and in_features % 8 == 0 and has_kernels(x)


def _compose(x, weight, bias, code, negative_slope, gated, gate_first):
    check("skinny_linear", x, weight, bias)
    odd = gated and weight.shape[0] % 2
    require(not odd, "skinny_linear", f"a gated layer has an even number of features, not {weight.shape[0]}")
    act, y = BY_CODE[code].reference, F.linear(x, weight, bias)
    if not gated:
        return act(y, negative_slope).contiguous()
    gate, up = y.chunk(2, -1) if gate_first else reversed(y.chunk(2, -1))
    return act(gate, negative_slope) * up


# x: (..., in); weight: (out, in), any strides, or (2 * out, in) if gated; bias: one value per row of weight. Returns
# (..., out), dense. No gradients.
skinny_linear = define(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, int activation, float negative_slope, bool gated, "
    "bool gate_first) -> Tensor",
    _compose,
)
