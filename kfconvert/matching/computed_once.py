"""Computes what depends on weights alone once, not in each call: masks, position biases, normalized weights."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Aliases, draws, fixed_size, is_weight, lower, written_arguments
from ..region import LiveTensors, Place

# Values with more bytes than this, and than the weights that they depend on, are computed in each call.
MOST_BYTES = 2**24
NAME = "computed_once"


class ComputedOnce(nn.Module):
    """The calls of ``body`` on weights; their results are a plan. See ``FusedModule`` for the methods.

    Args:
        places: of the weights, and of those of fused modules in ``body``.
    """

    def __init__(self, body: fx.GraphModule, places: list[Place], device: torch.device):
        super().__init__()
        self.body, self.device = body, device
        self._places = places

    def forward(self, *weights: Tensor) -> Any:
        return self.body(*weights)

    def plan(self, *weights: Tensor) -> Any:
        values = self.body(*weights)
        return lambda *weights: values

    def places(self) -> list[Place]:
        return self._places

    def held_places(self) -> list[Place]:
        return []

    def merged_weights(self) -> list[Tensor]:
        return []

    def clear_derived(self) -> None:
        for module in self.body.children():
            module.clear_derived()


def compute_once(
    graph: fx.Graph, root: dict[str, Any], copies: dict[fx.Node, fx.Node], live: LiveTensors, aliases: Aliases
) -> None:
    """Moves the calls in ``graph`` that depend on weights alone into one module, which is added to ``root``.

    Args:
        copies: by value of the captured graph, the value in ``graph``.
        aliases: of the captured graph.
    """
    originals = {copy: node for node, copy in copies.items()}
    found = _Search(graph, root, copies, originals, live, aliases)
    held = [node for node in found.known if found.is_held(node)]
    if not held:
        return
    needed, pending = set[fx.Node](), list(held)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [*node.all_input_nodes, *found.writers.get(found.root(node), ())]
    body = fx.Graph()
    weights = [node for node in graph.find_nodes(op="placeholder") if node in needed]
    inner = {node: body.placeholder(node.name) for node in weights}
    calls = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    for node in calls:
        inner[node] = body.node_copy(node, inner.__getitem__)
    body.output(tuple(inner[node] for node in held))
    lower(body)
    for node in body.nodes:
        node.meta.clear()  # traced values keep weak references to all weights, which could then not be swapped
    modules = {node.target: root[node.target] for node in calls if node.op == "call_module"}
    places = [live.store(originals[node]) for node in weights]
    places += [place for module in modules.values() for place in module.held_places()]
    root[NAME] = ComputedOnce(fx.GraphModule(modules, body).eval(), places, held[0].meta["val"].device)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        call = graph.call_module(NAME, tuple(weights))
        for index, node in enumerate(held):
            value = graph.call_function(operator.getitem, (call, index))
            value.meta = dict(node.meta)
            node.replace_all_uses_with(value, lambda user: user not in found.known)
    for node in reversed(list(found.known)):
        if not node.users:
            graph.erase_node(node)


class _Search:
    """``known`` has the calls that depend on weights alone, in order, each with the bytes of the largest weight below;
    ``writers`` the calls that write in place, by the root of the storage."""

    def __init__(
        self,
        graph: fx.Graph,
        root: dict[str, Any],
        copies: dict[fx.Node, fx.Node],
        originals: dict[fx.Node, fx.Node],
        live: LiveTensors,
        aliases: Aliases,
    ):
        self._modules, self._originals, self._live = root, originals, live
        captured = next(iter(copies)).graph
        self._aliases, self.writers = aliases, dict[fx.Node, list[fx.Node]]()
        for node in captured.nodes:
            for written in written_arguments(node):
                # A match that covers the call has no copy of it.
                self.writers.setdefault(self._aliases.root(written), []).append(copies.get(node, node))
        self._is_on_gpu = any(_is_on_gpu(node) for node in graph.find_nodes(op="placeholder"))
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        # The caller may write to outputs.
        blocked = {self.root(node) for node in captured.output_node().all_input_nodes}
        while True:
            self.known = self._computable(graph, blocked)
            more = {self.root(node) for node in self.known if not self._is_settled(node)}
            if not more:
                break
            blocked |= more

    def root(self, node: fx.Node) -> fx.Node:
        """The same node for all values that may share storage with a value."""
        return self._aliases.root(self._originals.get(node, node))

    def is_held(self, node: fx.Node) -> bool:
        """Whether calls in each call of the model read the value, and it is not a view of a weight."""
        value = node.meta.get("val")
        if all(user in self.known for user in node.users) or not isinstance(value, Tensor):
            return False
        if value.is_cuda != self._is_on_gpu:
            return False
        return not any(member.op == "placeholder" for member in self._aliases.members(self._originals[node]))

    def _computable(self, graph: fx.Graph, blocked: set[fx.Node]) -> dict[fx.Node, float]:
        known: dict[fx.Node, float] = {}
        weights, compressed = dict[fx.Node, float](), set[fx.Node]()
        for node in graph.nodes:
            if node.op == "placeholder":
                # A module would keep a reference to the model.
                if is_weight(node) and isinstance(self._live.store(self._originals[node])[0], dict):
                    weights[node] = max(map(_bytes, _values(node)), default=0.0)
                    if self._live.is_inner(node):
                        compressed.add(node)
            elif node in self._originals and self.root(node) not in blocked and self._is_plain(node):
                below = [known.get(each, weights.get(each)) for each in node.all_input_nodes]
                largest = max((size for size in below if size is not None), default=0.0)
                # A quantized weight would need as much memory as a plain one.
                is_compressed = not compressed.isdisjoint(node.all_input_nodes)
                most = largest if is_compressed else max(largest, MOST_BYTES)
                if None not in below and all(_bytes(value) <= most for value in _values(node)):
                    known[node] = largest
                    if is_compressed:
                        compressed.add(node)
        return known

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether the call returns the same for the same inputs, in fixed sizes, on the device of the model. Numbers
        may be in host memory, as those that are written into a slice."""
        if node.op == "call_module":
            is_pure = not getattr(self._modules[node.target], "caches", ())
        elif isinstance(node.target, torch._ops.OpOverload):
            is_pure = node.target.namespace == "aten" and bool(node.target._schema.returns) and not draws(node)
        else:
            is_pure = node.target is operator.getitem
        values = _values(node)
        is_here = all(each.is_cuda == self._is_on_gpu or each.dim() == 0 for each in values)
        return bool(is_pure and values and is_here)

    def _is_settled(self, node: fx.Node) -> bool:
        """Whether only known calls write to the value, all of them before any other call reads it."""
        writers = self.writers.get(self.root(node), [])
        if not writers:
            return True
        if any(writer not in self.known for writer in writers):
            return False
        last = max(map(self._order.__getitem__, writers))
        return all(user in self.known or self._order[user] > last for user in node.users)


def _values(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return list(values) if all(isinstance(each, Tensor) for each in values) else []


def _bytes(value: Tensor) -> float:
    """The number of bytes; infinite with a free size."""
    sizes = [fixed_size(size) for size in value.shape]
    return math.prod(math.inf if size is None else size for size in sizes) * value.itemsize


def _is_on_gpu(node: fx.Node) -> bool:
    return any(value.is_cuda for value in _values(node))
