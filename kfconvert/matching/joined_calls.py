"""Joins calls of norms and their only readers, where the modules can run in one launch."""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ..graph import aten

# Returns one module for a reader, the first argument, and one or two norms; None if there is none.
Join = Callable[..., nn.Module | None]


def join_calls(graph: fx.Graph, root: dict[str, Any], join: Join) -> None:
    """Replaces calls of norms and their only readers with calls of the module that ``join`` returns: for a reader of
    one norm's first result, ``join(reader, norm)``; for attention, ``join(attention, q_norm, k_norm)``."""
    for node in graph.find_nodes(op="call_module"):
        _join_reader(graph, root, join, node)
    for node in graph.find_nodes(op="call_module"):
        _join_norms_of_heads(graph, root, join, node)


def _join_reader(graph: fx.Graph, root: dict[str, Any], join: Join, node: fx.Node) -> None:
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    reader, *others = items.get(0, node).users or (node,)
    if others or reader.op != "call_module" or len(reader.args) != 1:
        return
    joined = join(root[reader.target], root[node.target])
    if joined is None:
        return
    name = f"{node.target}_{reader.target}"
    root[name] = joined
    with graph.inserting_before(node):
        call = graph.call_module(name, node.args)
        for index, before in {**items, 0: reader}.items():
            result = graph.call_function(operator.getitem, (call, index)) if items else call
            result.meta = dict(before.meta)
            before.replace_all_uses_with(result)
    for erased in (reader, *items.values(), node):
        graph.erase_node(erased)


def _join_norms_of_heads(graph: fx.Graph, root: dict[str, Any], join: Join, attention: fx.Node) -> None:
    """Joins ``attention`` and the norms of q and k, its first two arguments."""
    norms = [_norm_of(value) for value in attention.args[:2]]
    if len({*norms}) != 2 or None in norms:
        return
    joined = join(root[attention.target], *(root[norm.target] for norm in norms))
    if joined is None:
        return
    attention.target = "_".join(str(each.target) for each in (*norms, attention))
    root[attention.target] = joined
    for norm in norms:
        norm.replace_all_uses_with(norm.args[0])
        graph.erase_node(norm)


def _norm_of(heads: Any) -> Any:
    """Returns the call of a module whose result is ``heads``, or ``heads`` transposed; None if others read it."""
    is_transposed = isinstance(heads, fx.Node) and heads.target is aten.transpose.int and heads.args[1:] == (1, 2)
    nodes = [heads.args[0], heads] if is_transposed else [heads]
    is_only_read_here = all(isinstance(each, fx.Node) and len(each.users) == 1 for each in nodes)
    return nodes[0] if is_only_read_here and nodes[0].op == "call_module" else None
