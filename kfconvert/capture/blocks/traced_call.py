"""A call of a block as it was traced within a model, kept in a graph of its own."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...canonical import is_traced_batch_norm, restore_batch_norms
from ...region import Read


@dataclass(frozen=True)
class Recording:
    """One call of ``module``, which lay at ``path`` in the traced model.

    ``arguments`` are its args and kwargs as they were traced, with fake tensors, ``reads`` the names that it read
    from configurations. The nodes of the graph stand for the tensors among them (``node_of``), for those of the
    module (``state``, by module path and attribute name; tied ones share a node), for ``sizes`` that were computed
    before the call, and for what it computed. ``outputs`` has a node or a constant for each of the flat outputs, which
    ``spec`` packs.
    """

    module: nn.Module
    path: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    reads: frozenset[Read]
    state: dict[tuple[str, str], fx.Node]
    sizes: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    _nodes: tuple[fx.Node, ...]
    _of_tensor: dict[int, fx.Node]  # by the id of a tensor among the arguments

    def node_of(self, leaf: Any) -> fx.Node | None:
        """That of a tensor among the arguments, None for a constant."""
        return self._of_tensor.get(id(leaf))

    @classmethod
    def of(
        cls,
        module: nn.Module,
        path: str,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        reads: frozenset[Read],
        of_tensor: dict[int, fx.Node],
        state: dict[tuple[str, str], fx.Node],
        nodes: Iterable[fx.Node],
        outputs: Iterable[Any],
        spec: pytree.TreeSpec,
    ) -> Recording | None:
        """That of ``nodes`` of the graph of a trace; None where they do more than compute outputs from inputs."""
        if not all(map(_is_pure, nodes)):
            return None
        graph, copies = fx.Graph(), {}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a value from outside of the call
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
            return copies[node]

        state = {place: copied(node) for place, node in state.items()}
        of_tensor = {key: copied(node) for key, node in of_tensor.items()}
        known = set(copies.values())
        for node in nodes:
            copies[node] = graph.node_copy(node, copied)
        restore_batch_norms(graph)
        sizes = tuple(copy for copy in copies.values() if copy.op == "placeholder" and copy not in known)
        kept = tuple(copies[node] for node in nodes)
        outputs = tuple(copies[output] if isinstance(output, fx.Node) else output for output in outputs)
        return cls(module, path, arguments, reads, state, sizes, outputs, spec, kept, of_tensor)

    def copy_into(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """Append what the call computed, and its output, to ``graph``, where ``copies`` has all that it reads.

        None where it reads anything else.
        """
        for node in self._nodes:
            if not all(value in copies for value in node.all_input_nodes):
                return None
            copies[node] = graph.node_copy(node, copies.__getitem__)
            stack = node.meta.get("nn_module_stack")
            if stack is not None:
                copies[node].meta["nn_module_stack"] = _within(stack, self.path)
        return graph.output(tuple(copies.get(o) if isinstance(o, fx.Node) else o for o in self.outputs))


def _is_pure(node: fx.Node) -> bool:
    """Whether a node is an ATen operator or arithmetic of sizes, not a switch of modes, a check or a subgraph."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        known = node.target.namespace == "aten" or is_traced_batch_norm(node)
        return known and node.meta.get("val") is not None
    return getattr(node.target, "__module__", None) in (operator.add.__module__, "math") or node.target in _OF_SIZES


_OF_SIZES = (torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite)


def _within(stack: dict[str, tuple[str, str]], path: str) -> dict[str, tuple[str, str]]:
    """The modules around a node from the one at ``path`` on, named as they lie in that."""
    return {
        key: (inner[len(path) + 1 :], kind)
        for key, (inner, kind) in stack.items()
        if inner == path or inner.startswith(f"{path}.")
    }
