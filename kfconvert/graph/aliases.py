"""Analysis of the values of an ATen graph that share storage or are written in place."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

import torch
from torch import fx

from .schemas import Schema, schema_of
from .trees import Binding, arguments

_new_storages = count(-1, -1)


def _schema(node: fx.Node) -> Schema | None:
    return schema_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Returns the tensor arguments that the operator of ``node`` writes in place."""
    schema = _schema(node)
    if schema is None or not schema.written:
        return []
    given = arguments(node)
    written = []
    for place in schema.written:
        value = given[place]
        values = value if isinstance(value, (list, tuple)) else [value]
        written += [item for item in values if isinstance(item, fx.Node)]
    return written


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose storage a result of ``node`` may share (views, in-place results, list items)."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        container: Any = node.args[0]
        return [container]
    schema = _schema(node)
    if schema is None or not schema.shared:
        return []
    given = arguments(node)
    return [value for value in map(given.__getitem__, schema.shared) if isinstance(value, fx.Node)]


def is_written(node: fx.Node) -> bool:
    """Whether ``node``, or a view of it, is written in place. Does not detect writes through its base."""
    for user in node.users:
        if node in written_arguments(user) or (node in aliased_arguments(user) and is_written(user)):
            return True
    return False


def mark_storage(node: fx.Node, number: int) -> None:
    """Marks values of a graph that shared storage in the trace with the same ``number``, if fake tensors do not show
    it."""
    node.meta["kfconvert_storage"] = number


def new_storage() -> int:
    """Returns the number of a storage that no traced value has."""
    return next(_new_storages)


def storage_of(node: fx.Node) -> int | None:
    """Returns the storage of the traced value, because some schemas do not declare that an argument is returned."""
    if "kfconvert_storage" in node.meta:
        return node.meta["kfconvert_storage"]
    value = node.meta.get("val")
    has_storage = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if has_storage else None


class Aliases:
    """The aliases in a graph: ``root(node)`` is the same node for all values that may share storage."""

    def __init__(self, graph: fx.Graph):
        self._parent: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        firsts: dict[int, fx.Node] = {}
        for node in graph.nodes:
            for argument in aliased_arguments(node):
                self._join(node, argument)
            storage = storage_of(node)
            if storage is not None:
                self._join(node, firsts.setdefault(storage, node))
        written = []
        for node in graph.nodes:
            self._members[self.root(node)].append(node)
            written += written_arguments(node)
        self._written = {self.root(node) for node in written}

    def root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        if self.root(node) is not self.root(other):
            self._parent[self.root(node)] = self.root(other)

    def members(self, node: fx.Node) -> list[fx.Node]:
        """Returns all values that may share storage with ``node``, including ``node``, in graph order."""
        return self._members[self.root(node)]

    def is_written(self, node: fx.Node) -> bool:
        """Whether any value that shares storage with ``node`` is written in place somewhere in the graph."""
        return self.root(node) in self._written

    def reads_written(self, binding: Binding) -> bool:
        """Whether ``binding`` reads, outside or between its calls, values that the graph writes in place."""
        outer = [value for value in binding.captures.values() if isinstance(value, fx.Node)]
        return any(self.is_written(node) for node in (*binding.nodes, *outer))
