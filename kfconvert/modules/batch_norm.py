"""Batch normalization in eval mode with an activation, without a convolution before it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops.activations import apply_activation
from ..ops.fused.scale_shift_act import batch_norm_scale_and_shift, scale_shift_act
from ..ops.registration import has_kernels
from .base import CHANNELS_LAST, FusedModule, Plan, require_plain

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def scale_and_shift(bn: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns :func:`kfconvert.ops.fused.scale_shift_act.batch_norm_scale_and_shift` of bn's tensors."""
    return batch_norm_scale_and_shift(bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps)


def batch_norm(bn: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Computes ``bn(x)`` in one ATen call, without writing running statistics."""
    batch_statistics = bn.training or bn.running_mean is None
    mean, var = (None, None) if batch_statistics else (bn.running_mean, bn.running_var)
    return F.batch_norm(x, mean, var, bn.weight, bn.bias, batch_statistics, 0.0, bn.eps)


def _formatted(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the memory format of ATen's batch norm, because later code may need a view of a contiguous tensor."""
    channels_last = CHANNELS_LAST.get(x.dim())
    if x.is_contiguous() or (channels_last is not None and x.is_contiguous(memory_format=channels_last)):
        return x
    return x.contiguous()


class FusedBatchNormAct(FusedModule):
    """``y = act(bn(x))``, an ``nn.BatchNorm1d/2d/3d`` or ``nn.SyncBatchNorm`` and the activation after it.

    x: (N, C, *spatial); y has the memory format of x, or is contiguous if x has none. float64, float32,
    float16, bfloat16. The batch norm is the submodule ``bn``, shared and not copied; its hooks do not run.

    In eval mode, bn is a scale and a shift per channel. :func:`scale_and_shift` computes them in float64 from the
    live tensors, and again after each change. The original bn runs if it uses batch statistics (``bn.training`` or
    ``track_running_stats=False``), if a gradient is needed, and under autocast.
    Strategies: "kernel" (``kfconvert.ops.scale_shift_act``), "composition".
    TypeError: not a batch norm, lazy. ValueError: parametrized, unknown activation.
    """

    live_strategies = ("composition",)

    def __init__(self, bn: nn.Module, activation: str = "none", negative_slope: float = 0.01):
        super().__init__(activation, negative_slope)
        require_plain(bn, _NORMS, "an nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d")
        self.bn = bn
        self.training = bn.training

    @classmethod
    def examples(cls):
        yield cls(nn.BatchNorm2d(4), "relu").eval(), (torch.randn(2, 4, 5, 5),)

    def strategies(self, x: torch.Tensor) -> list[str]:
        dtypes = {t.dtype for t in self.sources() if t.is_floating_point()}
        return ["kernel", "composition"] if has_kernels(x) and dtypes == {x.dtype} else ["composition"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the module's result. x: (N, C, *spatial); returns the same shape and dtype."""
        bn = self.bn
        if bn.training or bn.running_mean is None:
            return apply_activation(bn(x), self.activation, self.negative_slope)
        return super().forward(x)

    def plan(self, x: torch.Tensor) -> Plan:
        """Raises ValueError if bn uses the statistics of the batch."""
        if self.bn.training or self.bn.running_mean is None:
            raise ValueError("a batch norm that uses the statistics of the batch has no plan")
        return self.reference if self.choose(x) == "composition" else self._folded()

    def _folded(self) -> Plan:
        wide = torch.float64 if self.bn.running_mean.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False), torch.no_grad():
            scale, shift = (tensor.to(wide) for tensor in scale_and_shift(self.bn))
        activation = self.activation, self.negative_slope
        return lambda x: scale_shift_act(_formatted(x), scale, shift, *activation)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Computes ``act(bn(x))`` in plain ATen calls, without writing running statistics."""
        return apply_activation(batch_norm(self.bn, x), self.activation, self.negative_slope)
