"""Fixed and free sizes of traced tensors, and numbers computed from them.

If a trace finds that a free size can only be one number, it stays a ``SymInt``, whose expression is that number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


def fixed_size(size: Any) -> int | None:
    """Returns the number of a fixed size of a traced tensor; None for a free size."""
    if isinstance(size, torch.SymInt):
        return size.node.maybe_as_int()
    return size if isinstance(size, int) else None


def sizes_of(value: Any) -> tuple[Any, ...] | None:
    """Returns the sizes of a traced tensor, free sizes as expressions: comparing ``SymInt`` would add guards to the
    trace. None for another value."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)


def same_sizes(node: fx.Node, other: fx.Node, *dimensions: int) -> bool:
    """Whether both values have the same sizes in these dimensions, for all values of free sizes."""
    pairs = ([each.meta["val"].shape[dimension] for each in (node, other)] for dimension in dimensions)
    return all(statically_known_true(one == another) for one, another in pairs)


def spell_sizes(graph: fx.Graph) -> None:
    """Replaces sizes, and values computed from them, with their numbers, if the trace fixed them after the forward had
    read them as free sizes."""
    for node in graph.nodes:
        number = _number_of(node) if node.op == "call_function" else None
        for user in list(node.users) if number is not None else ():
            # Functions on the device (cond) keep their arguments.
            if user.op == "call_function" and not isinstance(user.target, torch._ops.HigherOrderOperator):
                _put(number, node, user)


def _number_of(node: fx.Node) -> int | float | None:
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat) and not node.all_input_nodes:
        return node.target(*node.args, **node.kwargs)  # like the forward; the expression may round
    return fixed_size(value)


def _put(number: Any, node: fx.Node, user: fx.Node) -> None:
    """Replaces ``node`` with ``number`` among the arguments of ``user``."""

    def given(each: fx.Node) -> Any:
        return number if each is node else each

    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), given)
