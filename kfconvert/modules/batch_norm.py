"""Batch normalisation in eval mode with an activation: what is left where no convolution comes before it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops.activations import apply_activation
from ..ops.fused.scale_shift_act import batch_norm_scale_and_shift, scale_shift_act
from ..ops.registration import has_kernels
from .base import CHANNELS_LAST, FusedModule, Plan, require_plain, takes_plain_path

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def scale_and_shift(bn: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`kfconvert.ops.fused.scale_shift_act.batch_norm_scale_and_shift` of bn's tensors."""
    return batch_norm_scale_and_shift(bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps)


def batch_norm(bn: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """``bn(x)`` in one ATen call; running statistics are never written."""
    batch_statistics = bn.training or bn.running_mean is None
    mean, var = (None, None) if batch_statistics else (bn.running_mean, bn.running_var)
    return F.batch_norm(x, mean, var, bn.weight, bn.bias, batch_statistics, 0.0, bn.eps)


def _formatted(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a memory format, as ATen's batch norm returns: code that follows may view what is contiguous there."""
    channels_last = CHANNELS_LAST.get(x.dim())
    if x.is_contiguous() or (channels_last is not None and x.is_contiguous(memory_format=channels_last)):
        return x
    return x.contiguous()


class FusedBatchNormAct(FusedModule):
    """``y = act(bn(x))``, an ``nn.BatchNorm1d/2d/3d`` or ``nn.SyncBatchNorm`` and the activation after it.

    x: (N, C, *spatial); y in the memory format of x, contiguous where x is in none. float64, float32,
    float16, bfloat16. The batch norm is kept as submodule ``bn``, shared and not copied; its hooks are not run.

    In eval, bn becomes one product and one sum by channel, with the scale and shift of
    :func:`scale_and_shift` computed in float64 from the live tensors, and again whenever they change. Where
    bn uses batch statistics (``bn.training`` or ``track_running_stats=False``), where a gradient is needed
    and under autocast it runs as it is.
    Strategies: "kernel" (``kfconvert.ops.scale_shift_act``), "composition".
    TypeError: not a batch norm, lazy. ValueError: parametrised, unknown activation.
    """

    live_strategies = ("composition",)

    def __init__(self, bn: nn.Module, activation: str = "none", negative_slope: float = 0.01):
        super().__init__(activation, negative_slope)
        require_plain(bn, _NORMS, "an nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d")
        self.bn = bn
        self.training = bn.training

    def strategies(self, x: torch.Tensor) -> list[str]:
        """Those that apply to ``x`` (N, C, *spatial), best guess first."""
        dtypes = {t.dtype for t in self._sources() if t.is_floating_point()}
        return ["kernel", "composition"] if has_kernels(x) and dtypes == {x.dtype} else ["composition"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, C, *spatial); returns the same shape and dtype."""
        bn = self.bn
        if bn.training or bn.running_mean is None:
            return apply_activation(bn(x), self.activation, self.negative_slope)
        if takes_plain_path(x, self._sources()):
            return self.reference(x)
        return self.plan(x)(x)

    def plan(self, x: torch.Tensor) -> Plan:
        """See :meth:`FusedModule.plan`. ValueError where bn uses the statistics of the batch."""
        if self.bn.training or self.bn.running_mean is None:
            raise ValueError("a batch norm that uses the statistics of the batch has no plan")
        if self.choose(x) == "composition":
            return self.reference
        values = self._prepared(self._sources())
        if "plan" not in values:
            values["plan"] = self._kernel()
        return values["plan"]

    def _sources(self) -> list[torch.Tensor]:
        # The count of batches too: aten::batch_norm updates the statistics without moving their versions.
        stores = (self.bn._parameters, self.bn._buffers)
        return [tensor for store in stores for tensor in store.values() if tensor is not None]

    def _kernel(self) -> Callable[[torch.Tensor], torch.Tensor]:
        wide = torch.float64 if self.bn.running_mean.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False), torch.no_grad():
            scale, shift = (tensor.to(wide) for tensor in scale_and_shift(self.bn))
        activation = self.activation, self.negative_slope
        return lambda x: scale_shift_act(_formatted(x), scale, shift, *activation)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """``act(bn(x))`` in plain ATen calls. Running statistics are never written."""
        return apply_activation(batch_norm(self.bn, x), self.activation, self.negative_slope)

    def extra_repr(self) -> str:
        return self._activation_repr()
