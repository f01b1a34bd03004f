"""Activations without a match, which are candidates for user-defined fusions."""

from __future__ import annotations

import torch
from torch import fx

from ..graph import aten, location, module_path
from ..matching import Findings, UnmatchedActivation

_NAMES = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu relu6 rrelu selu "
    "sigmoid silu softplus softshrink tanh threshold"
)
ACTIVATIONS = frozenset(getattr(aten, name).default for name in _NAMES.split())


def unmatched_activations(graph: fx.Graph, findings: Findings) -> list[UnmatchedActivation]:
    """Returns the activations of ``graph`` outside all matches of ``findings``, in graph order."""
    matches = [*findings.matches, *(each.match for each in findings.left_out)]
    covered = {node for match in matches for node in match.nodes}
    return [
        UnmatchedActivation(str(node.target), _reads(node), module_path(node), location(node))
        for node in graph.nodes
        if node.op == "call_function" and node.target in ACTIVATIONS and node not in covered
    ]


def _reads(node: fx.Node) -> str | None:
    """The operator that computes the input of an activation; None for an argument of the model."""
    source = node.args[0]
    is_call = isinstance(source, fx.Node) and isinstance(source.target, torch._ops.OpOverload)
    return str(source.target) if is_call else None
