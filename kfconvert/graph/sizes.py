"""Sizes of traced tensors, and numbers that are computed from them: some are free.

Where a trace finds that a free size can be one number only, a ``SymInt`` stays, whose expression is that number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def fixed_size(size: Any) -> int | None:
    """The number that a size of a traced tensor always is, None for a free one."""
    if isinstance(size, torch.SymInt):
        return size.node.maybe_as_int()
    return size if isinstance(size, int) else None


def spell_sizes(graph: fx.Graph) -> None:
    """A size, or what is computed from sizes, becomes the number that it always is, where the trace has found that out
    after the forward had read it as a free one."""
    for node in graph.nodes:
        number = _number_of(node) if node.op == "call_function" else None
        for user in list(node.users) if number is not None else ():
            # Functions that run on the device (cond) keep their arguments.
            if user.op == "call_function" and not isinstance(user.target, torch._ops.HigherOrderOperator):
                _put(number, node, user)


def _number_of(node: fx.Node) -> int | float | None:
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat) and not node.all_input_nodes:
        return node.target(*node.args, **node.kwargs)  # as the forward computes it, which its expression may round
    return fixed_size(value)


def _put(number: Any, node: fx.Node, user: fx.Node) -> None:
    """Let ``user`` have ``number`` in the place of ``node`` among its arguments."""

    def given(each: fx.Node) -> Any:
        return number if each is node else each

    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), given)
