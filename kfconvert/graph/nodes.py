"""Properties of a node of a graph: its module, side effects, and whether it is a weight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from .schemas import schema_of
from .trees import arguments

# Namespaces of collective operators.
_OF_RANKS = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))

# Arguments that disable the random draws of an operator. (With a dropout probability of 0, some kernels still draw
# numbers.)
_IDLE = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


def module_path(node: fx.Node) -> str:
    """Returns the dotted path of the module whose forward created ``node``; "" is the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def is_of_module(node: fx.Node) -> bool:
    """Whether the module whose forward created ``node`` is known. It is unknown for nodes that passes insert between
    calls."""
    return bool(node.meta.get("nn_module_stack"))


def has_effect(node: fx.Node) -> bool:
    """Whether a call has side effects, such as advancing a random generator. A call without a result, such as an
    assertion, has side effects."""
    nothing = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
    return nothing or node.is_impure(impure_random=False) or draws(node)


def communicates(node: fx.Node) -> bool:
    """Whether a call is a collective, which other ranks wait for, or waits for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _OF_RANKS


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers. Attention and recurrent layers draw with dropout, and operators with a
    training flag only in training."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target: Any = node.target
    return not any(
        name in _IDLE and given == _IDLE[name] for name, given in zip(schema_of(target).names, arguments(node))
    )


def is_weight(node: Any) -> bool:
    """Whether a value is a parameter, buffer or constant of the model (see ``mark_weights``)."""
    return isinstance(node, fx.Node) and node.meta.get("kfconvert_weight", False)


def is_parameter(node: Any) -> bool:
    """Whether a value is a parameter of the model (see ``mark_weights``)."""
    return isinstance(node, fx.Node) and node.meta.get("kfconvert_parameter", False)


def mark_weights(
    graph: fx.Graph, names: Iterable[str], parameters: Collection[str] = (), classes: Mapping[str, type] | None = None
) -> None:
    """Marks the placeholders ``names`` as parameters, buffers or constants of the model, and those in ``parameters`` as
    parameters. ``classes`` has the classes of tensor subclasses."""
    wanted = set(names)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in wanted:
            node.meta["kfconvert_weight"] = True
            node.meta["kfconvert_parameter"] = node.name in parameters
            node.meta["kfconvert_class"] = (classes or {}).get(node.name)
