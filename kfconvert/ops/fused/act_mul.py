"""act_mul: ``y = act(gate) * up``, the middle of a gated MLP, in one pass over memory."""

import torch

from ..activations import CODES
from ..declaration import declare
from .combine_act import Combination, combine_act

__all__ = ["act_mul"]


@declare(
    group="elementwise",
    example=lambda t, rows, columns: (t(rows, columns), t(columns), "silu"),
    timed_as="swish_multiply and geglu",
)
def act_mul(gate: torch.Tensor, up: torch.Tensor, activation: str, negative_slope: float = 0.01) -> torch.Tensor:
    """Computes ``act(gate) * up``, in the memory format of the first argument with the shape of the result.

    Args:
        gate: any shape; float64, float32, float16 or bfloat16 (half types are computed in float32).
        up: gate's dtype and device (autocast aligns the dtypes), a shape that broadcasts with gate's. Both
            may be views with any strides, such as the halves ``h.chunk(2, -1)`` of a packed tensor. They are read
            without a copy, and the result is contiguous.
        activation: a name in :data:`kfconvert.ops.ACTIVATIONS`.
        negative_slope: slope of leaky_relu.

    Raises:
        ValueError: unknown activation. RuntimeError: incompatible shapes, dtypes or devices.
    """
    return combine_act(gate, up, Combination.GATED, CODES[activation], negative_slope)
