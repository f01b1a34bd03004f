"""Group normalization and the activation after it."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.activations import apply_activation
from ..ops.fused.group_norm_act import group_norm_act
from ..ops.norms import is_channels_last
from .base import FusedModule, held, require_plain


class FusedGroupNorm(FusedModule):
    """``y = act(group_norm(x))``, an ``nn.GroupNorm`` and the activation after it.

    x: (N, C, ...); y as x. float64, float32, float16, bfloat16. The norm is the submodule ``norm``, shared and not
    copied; its hooks do not run.
    Strategies: "kernel" (``kfconvert.ops.group_norm_act``; contiguous x, on CUDA also channels-last), "composition".
    TypeError: not an nn.GroupNorm. ValueError: parametrized, unknown activation.
    """

    live_strategies = ("kernel", "composition")

    def __init__(self, norm: nn.Module, activation: str = "none", negative_slope: float = 0.01):
        super().__init__(activation, negative_slope)
        require_plain(norm, (nn.GroupNorm,), "an nn.GroupNorm")
        self.norm = norm
        self.training = norm.training

    @classmethod
    def examples(cls):
        yield cls(nn.GroupNorm(2, 4), "silu"), (torch.randn(2, 4, 5, 5),)

    def strategies(self, x: torch.Tensor) -> list[str]:
        weight = held(self.norm, "weight")
        # On the CPU, the kernel copies channels-last images.
        fits = x.is_contiguous() or (x.is_cuda and is_channels_last(x))
        return super().strategies(x) if fits and (weight is None or weight.dtype == x.dtype) else ["composition"]

    def _kernel(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        return group_norm_act(
            x, norm.num_groups, held(norm, "weight"), held(norm, "bias"), norm.eps, self.activation, self.negative_slope
        )

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        y = F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
        return apply_activation(y, self.activation, self.negative_slope)
