"""Batch norm and activation without a convolution before them, as in DenseNet: ``act(bn(x))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Op, Var, aten
from ..matching import Case, Match, Replacement
from ..modules import FusedBatchNormAct
from .activations import family, negative_slope
from .cases import IMAGES, Make, batch_norm, chain, conv, net, random
from .checks import dtype_refusal, traced, weights_refusal
from .skeletons import NORM_ARGUMENTS, NORM_MODULES, NORM_TENSORS, norm_shell

_NORM = Op(aten.batch_norm.default, Var("x"), *NORM_ARGUMENTS, name="norm")


def _refusal(match: Match) -> str | None:
    captures = match.captures
    if captures["training"]:
        return "the batch norm uses the statistics of the batch"
    if traced(captures["norm"]).dim() not in NORM_MODULES:
        return f"its input has {traced(captures['norm']).dim()} dimensions, which no batch norm module accepts"
    tensors = {name: captures[name] for name in NORM_TENSORS}
    return weights_refusal(**tensors) or dtype_refusal(captures["x"], *tensors.values())


def _build(match: Match, tensor: Callable[[fx.Node], Tensor], activation: str) -> Replacement:
    norm, bindings = norm_shell(match.captures, tensor)
    module = FusedBatchNormAct(norm.eval(), activation, negative_slope(match.captures))
    return Replacement(module, (match.captures["x"],), tuple(bindings), (match.root,))


def _cases(act: Make) -> tuple[Case, ...]:
    """A pre-activation layer whose result is concatenated with its input."""
    dense = net(
        lambda self, x: torch.cat((x, self.conv(self.act(self.norm(x)))), 1),
        norm=batch_norm(),
        conv=conv(padding=1, bias=False),
        act=act,
    )
    return (Case(dense, IMAGES),)


def _of_six_dimensions(self: Any, x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var).relu()


PATTERNS = family(
    "batchnorm",
    lambda act: act(_NORM),
    "relu relu6 silu hardswish gelu leaky_relu none",
    _build,
    _cases,
    special={
        "relu": (
            Case(chain(lambda: nn.BatchNorm1d(8, eps=0.1), nn.ReLU), random((5, 8))),
            Case(chain(lambda: nn.BatchNorm1d(8), lambda: nn.ReLU(inplace=True)), random((2, 8, 9))),
            Case(chain(lambda: nn.BatchNorm3d(8, affine=False), nn.ReLU), random((2, 8, 3, 3, 3))),
            Case(net(lambda self, x: torch.relu(y := self.norm(x)) + y, norm=batch_norm()), IMAGES, 0, "also used by"),
            Case(chain(batch_norm(track_running_stats=False), nn.ReLU), IMAGES, 0, "statistics of the batch"),
            Case(chain(conv(), batch_norm(), nn.ReLU), IMAGES, 0),
            Case(net(_of_six_dimensions, norm=batch_norm()), random((2, 8, 1, 2, 1, 3)), 0, "6 dimensions"),
        )
    },
    anchor="norm",
    refusal=_refusal,
)
