"""Squeeze-and-excitation: scales an image's channels by a small network of their means."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.activations import ACTIVATIONS, apply_activation
from ..ops.fused.linear_act import linear_act
from .base import FusedModule, Plan, held, require_plain


class FusedSqueezeExcite(FusedModule):
    """``y = x * gate(conv2(act(conv1(mean(x)))))`` (Hu et al., arXiv:1709.01507).

    x: (N, C, H, W), contiguous or channels-last, the mean over H and W; conv1, conv2: ``nn.Conv2d`` with a
    1x1 kernel, C to any number of channels and back to C; y as x. float64, float32, float16, bfloat16. On an
    image of one pixel such a convolution is a linear layer, which ``kfconvert.ops.linear_act`` computes together
    with the activation. The convolutions are submodules, shared and not copied; their hooks do not run.

    ``activation``, ``gate``: names in ``kfconvert.ops.ACTIVATIONS``.
    Strategies: "kernel", "composition" (the original convolutions).
    TypeError: not plain convolutions. ValueError: padding, groups, a kernel larger than 1x1, channels that do
    not match, unknown activations.
    """

    live_strategies = ("composition",)

    def __init__(self, conv1: nn.Module, conv2: nn.Module, activation: str = "relu", gate: str = "sigmoid"):
        super().__init__(activation)
        if gate not in ACTIVATIONS:
            raise ValueError(f"unknown activation {gate!r}; known: {', '.join(ACTIVATIONS)}")
        self.gate = gate
        for conv in (conv1, conv2):
            require_plain(conv, (nn.Conv2d,), "an nn.Conv2d")
            padded = conv.padding not in ((0, 0), "valid", "same")
            if conv.kernel_size != (1, 1) or conv.groups != 1 or padded:
                raise ValueError(f"expected a 1x1 convolution without padding and groups, got {conv}")
        if conv2.in_channels != conv1.out_channels or conv2.out_channels != conv1.in_channels:
            raise ValueError(f"the channels of {conv1} and {conv2} do not match")
        self.conv1, self.conv2 = conv1, conv2
        self.training = conv1.training

    @classmethod
    def examples(cls):
        yield cls(nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)), (torch.randn(2, 4, 5, 5),)

    def plan(self, x: torch.Tensor) -> Plan:
        if self.choose(x) == "composition":
            return self.reference
        weight1, weight2 = (held(conv, "weight").detach().flatten(1) for conv in (self.conv1, self.conv2))
        bias1, bias2 = held(self.conv1, "bias"), held(self.conv2, "bias")

        def kernel(x: torch.Tensor) -> torch.Tensor:
            hidden = linear_act(x.mean((2, 3)), weight1, bias1, self.activation)
            gates = linear_act(hidden, weight2, bias2, self.gate)
            return x * gates[:, :, None, None]

        return kernel

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        conv1, conv2 = self.conv1, self.conv2
        hidden = F.conv2d(x.mean((2, 3), keepdim=True), conv1.weight, conv1.bias)
        hidden = apply_activation(hidden, self.activation)
        return x * apply_activation(F.conv2d(hidden, conv2.weight, conv2.bias), self.gate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate!r}"
