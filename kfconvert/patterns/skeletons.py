"""Modules around the live tensors of a match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from ..graph import Either, Op, Tree, Var, aten
from ..matching import Match, Replacement
from ..modules import FusedLinear
from .checks import traced

_CONV_MODULES = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
NORM_MODULES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}

# Arguments of aten.batch_norm after its input.
NORM_ARGUMENTS = tuple(map(Var, ("scale", "shift", "mean", "variance", "training", "momentum", "eps", "cudnn_enabled")))
NORM_TENSORS = ("scale", "shift", "mean", "variance")

Live = Callable[[fx.Node], Tensor]
Bindings = list[tuple[nn.Module, str, fx.Node]]


def cast(tree: Tree, name: str) -> Either:
    """Returns ``tree``, or its conversion to a dtype captured as ``name``."""
    return Either(Op(aten.to.dtype, tree, Var(name)), tree)


def conv_shell(captures: dict[str, Any], tensor: Live) -> tuple[nn.Module, Bindings]:
    """Creates the convolution of the captures "weight", "bias", "stride", "padding", "dilation" and "groups"."""
    weight, padding = tensor(captures["weight"]), captures["padding"]
    conv = _CONV_MODULES[weight.dim()](
        weight.shape[1] * captures["groups"],
        weight.shape[0],
        tuple(weight.shape[2:]),
        tuple(captures["stride"]),
        padding if isinstance(padding, str) else tuple(padding),
        tuple(captures["dilation"]),
        captures["groups"],
        bias=captures["bias"] is not None,
        device="meta",
    )
    return conv, hold(conv, {"weight": captures["weight"], "bias": captures["bias"]}, tensor)


def norm_shell(captures: dict[str, Any], tensor: Live) -> tuple[nn.Module, Bindings]:
    """Creates the batch norm of the captures ``NORM_ARGUMENTS`` and of its call "norm"."""
    norm = NORM_MODULES[traced(captures["norm"]).dim()](
        traced(captures["mean"]).shape[0],
        captures["eps"],
        captures["momentum"],
        affine=captures["scale"] is not None,
        device="meta",
    )
    norm.num_batches_tracked = None
    names = dict(zip(("weight", "bias", "running_mean", "running_var"), NORM_TENSORS))
    return norm, hold(norm, {name: captures[key] for name, key in names.items()}, tensor)


def hold(module: nn.Module, nodes: dict[str, fx.Node | None], tensor: Live) -> Bindings:
    """Replaces meta tensors of ``module`` with the live tensors, without copies."""
    for name, node in nodes.items():
        store: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
        store[name] = None if node is None else tensor(node)
    return bound(module, nodes)


def bound(module: nn.Module, nodes: dict[str, fx.Node | None]) -> Bindings:
    """Returns the bindings of the attributes of ``module`` that ``nodes`` names."""
    return [(module, name, node) for name, node in nodes.items() if node is not None]


def live(tensor: Live, nodes: dict[str, fx.Node | None]) -> dict[str, Any]:
    return {name: None if node is None else tensor(node) for name, node in nodes.items()}


def fused_linear(captures: dict[str, Any], tensor: Live, prefix: str = "") -> tuple[FusedLinear, Bindings]:
    """Creates the linear layer of the captures "weight" and "bias" with this ``prefix``."""
    nodes = {name: captures[prefix + name] for name in ("weight", "bias")}
    linear = FusedLinear.from_tensors(**live(tensor, nodes))
    return linear, bound(linear, nodes)


def norm_replacement(
    match: Match, tensor: Live, kinds: tuple[Any, Any], nodes: dict[str, fx.Node | None], **options: Any
) -> Replacement:
    """Creates a norm that holds ``nodes``: the first of ``kinds``, or the second if the match adds a "residual"."""
    captures = match.captures
    if "residual" not in captures:
        module = kinds[0].from_tensors(**live(tensor, nodes), **options)
        return Replacement(module, (captures["x"],), tuple(bound(module, nodes)), (match.root,))
    keeps_sum = match.is_kept("sum")
    module = kinds[1].from_tensors(**live(tensor, nodes), **options, return_sum=keeps_sum)
    outputs = (match.root, captures["sum"]) if keeps_sum else (match.root,)
    return Replacement(module, (captures["x"], captures["residual"]), tuple(bound(module, nodes)), outputs)
