"""Repeats a traced layer in a graph for the layers that were not traced, see ``alike_layers``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..accuracy import is_same_tensor
from ..graph import mark_storage, storage_of
from ..region import Region
from .alike_layers import TRACED, Stack


class Unalike(Exception):
    """Raised if the traced layers differ in more than their places. The message has the reason."""


def repeat(region: Region, stacks: Sequence[Stack]) -> None:
    """Adds the layers that a shortened model left out to its graph. Raises Unalike."""
    for stack in stacks:
        _Repetition(region, stack).run()
    region.graph.lint()


class _Repetition:
    def __init__(self, region: Region, stack: Stack):
        self._region, self._stack, self._graph = region, stack, region.graph
        self._placeholders = {node.name: node for node in region.graph.find_nodes(op="placeholder")}
        self._weights = {place: self._placeholders[name] for name, place in region.slots.items()}
        self._storages = count(-1, -1)  # numbers that no storage has
        first = stack.traced - TRACED
        self._paths = [f"{stack.path}.{index}" for index in range(first, first + TRACED)]
        self._spans: list[list[fx.Node]] = [[] for _ in self._paths]
        for node in self._graph.nodes:
            for span, path in zip(self._spans, self._paths):
                if node.op != "placeholder" and _is_within(node, path):
                    span.append(node)
        for span in self._spans:
            self._take_sources(span)
        if len({len(span) for span in self._spans}) > 1:
            raise Unalike("layers have different numbers of operators")

    def _take_sources(self, span: list[fx.Node]) -> None:
        """Adds values that only this layer uses, such as copies of its states, to its nodes."""
        found = set(span)
        for node in reversed(self._graph.nodes):
            is_source = node.op == "call_function" and node.users and found.issuperset(node.users)
            if is_source and not _is_within(node, self._stack.path):
                found.add(node)
        span[:] = [node for node in self._graph.nodes if node in found]

    def run(self) -> None:
        one, two, three = self._spans
        if not three:
            return  # this call does not use the layers
        # Values outside of a layer that it uses, and the corresponding ones of the next layer.
        before, after = self._outer(one, two), self._outer(two, three)
        self._second_to_third = dict(zip(two, three))
        earlier = {value: each for each, value in before.items()}
        sources = {following: self._source(earlier[value], value, following) for value, following in after.items()}
        self._check_users()
        places, markers = self._places(), self._markers()
        latest = dict(zip(three, three))
        cursor = three[-1]
        output = list(self._graph.output_node().args[0])
        for index in range(self._stack.traced, self._stack.count):
            distance = index - self._stack.traced + 1
            for name, (path, attribute) in list(self._region.slots.items()):  # also those that no operator reads
                if _is_in(path, self._paths[-1]):
                    inside = path.removeprefix(self._paths[-1])
                    self._weight(self._placeholders[name], f"{self._stack.path}.{index}", inside, attribute)
            found = {each: self._found(source, each, distance, latest) for each, source in sources.items()}
            storages = {storage_of(each): storage_of(other) for each, other in found.items()}
            made: dict[fx.Node, fx.Node] = {}
            for node in three:
                cursor = made[node] = self._copied(node, found, storages, cursor, index)
                found[node] = cursor
            for place, step, node in places:
                at = place + step * distance
                if not 0 <= at < len(output):
                    raise Unalike("an output of a layer has no place")
                output[at] = made[node]
            latest = made
        self._use_last(latest, output, {node for *_, node in places}, markers)

    def _outer(self, one: list[fx.Node], two: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        inner, outer = dict(zip(one, two)), dict[fx.Node, fx.Node]()
        for node, other in inner.items():
            ours, theirs = ([*pytree.tree_leaves((each.args, each.kwargs))] for each in (node, other))
            alike = (node.op, node.target) == (other.op, other.target) and len(ours) == len(theirs)
            if not alike or isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "get_attr":
                raise Unalike(f"{node.name} and {other.name} differ")
            for value, following in zip(ours, theirs):
                if isinstance(value, fx.Node) and isinstance(following, fx.Node):
                    expected = inner[value] if value in inner else outer.setdefault(value, following)
                    if expected is not following:
                        raise Unalike(f"{node.name} and {other.name} have different inputs")
                elif type(value) is not type(following) or value != following:
                    raise Unalike(f"{node.name} and {other.name} have different arguments")
        return outer

    def _source(self, earlier: fx.Node, value: fx.Node, following: fx.Node) -> Any:
        """Where later layers find an input that is ``earlier``, ``value`` and ``following`` for the traced ones: the
        place of a weight in the layer, the distance between arguments, or the corresponding result of the layer
        before, as a node of the second one; None for ``following`` itself."""
        region, (_, second, third) = self._region, self._paths
        if earlier is value is following or self._are_equal_constants(value, following):
            return None
        if value.name in region.slots and following.name in region.slots:
            (path, name), (other, same) = region.slots[value.name], region.slots[following.name]
            inside = path.removeprefix(second)
            if path.startswith(second) and other == third + inside and name == same:
                return inside, name
        if value.name in region.inputs and following.name in region.inputs:
            return region.inputs.index(following.name) - region.inputs.index(value.name)
        one, two, _ = self._spans
        if value in one and two[one.index(value)] is following:
            return following
        raise Unalike(f"{value.name} and {following.name} do not correspond")

    def _are_equal_constants(self, value: fx.Node, following: fx.Node) -> bool:
        ours, theirs = (self._region.constants.get(each.name) for each in (value, following))
        if ours is None or theirs is None:
            return False
        return ours.stride() == theirs.stride() and is_same_tensor(ours, theirs)

    def _found(self, source: Any, node: fx.Node, distance: int, latest: dict[fx.Node, fx.Node]) -> fx.Node:
        region = self._region
        if source is None:
            return node
        if isinstance(source, fx.Node):
            return latest[self._second_to_third[source]]
        if isinstance(source, int):
            place = region.inputs.index(node.name) + source * distance
            if not 0 <= place < len(region.inputs):
                raise Unalike("a layer has no argument")
            return self._placeholders[region.inputs[place]]
        return self._weight(node, f"{self._stack.path}.{self._stack.traced - 1 + distance}", *source)

    def _weight(self, node: fx.Node, layer: str, inside: str, name: str) -> fx.Node:
        """The placeholder of a weight of ``layer``, which is like ``node`` of the third one."""
        place = layer + inside, name
        if place not in self._weights:
            old, new = (path.replace(".", "_").lower() for path in (self._paths[-1], layer))
            with self._graph.inserting_after(node):
                own = node.name.replace(old, new, 1)
                made = self._graph.create_node("placeholder", own, name=own)
            made.meta = dict(node.meta)
            mark_storage(made, next(self._storages))
            self._weights[place] = self._placeholders[made.name] = made
            self._region.slots[made.name] = place
        return self._weights[place]

    def _copied(
        self, node: fx.Node, found: dict[fx.Node, fx.Node], storages: dict[Any, Any], cursor: fx.Node, index: int
    ) -> fx.Node:
        """Copies ``node`` of the third layer after ``cursor`` for the layer ``index``. Its traced value has the same
        properties, but another storage."""
        with self._graph.inserting_after(cursor):
            made = self._graph.node_copy(node, found.__getitem__)
        made.meta = dict(node.meta)
        storage = storage_of(node)
        if storage is not None:
            if storage not in storages:
                storages[storage] = next(self._storages)
            mark_storage(made, storages[storage])
        old, new = self._paths[-1], f"{self._stack.path}.{index}"
        made.meta["nn_module_stack"] = {
            key: (new + path.removeprefix(old) if _is_in(path, old) else path, kind)
            for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items()
        }
        return made

    def _check_users(self) -> None:
        """Raises Unalike if code after the layers uses results of others than the last one, which it may count from
        the end. Outputs that each layer has are no such results."""
        of_each = {node for *_, node in self._places()}
        of_first, of_second = (dict(zip(span, self._spans[-1])) for span in self._spans[:-1])
        for node in self._graph.nodes:
            if node in self._spans[-1] or not _is_within(node, self._stack.path):
                continue
            for user in node.users:
                if user.op != "output":
                    allowed = _is_within(user, self._stack.path) or any(user in span for span in self._spans)
                else:
                    third = of_first.get(node, of_second.get(node))
                    allowed = third in of_each or (third is None and bool(of_each))
                if not allowed:
                    raise Unalike("code after the layers uses results of each")

    def _places(self) -> list[tuple[int, int, fx.Node]]:
        """For each output that every layer has: its place for the third layer, the distance between places, and its
        node there."""
        output, found = list(self._graph.output_node().args[0]), []
        of_second = {third: second for second, third in self._second_to_third.items()}
        of_first = dict(zip(self._spans[1], self._spans[0]))
        for place, node in enumerate(output):
            second = of_second.get(node) if isinstance(node, fx.Node) else None
            if second is None:
                continue
            known = [output.index(each) if each in output else None for each in (second, of_first[second])]
            if known == [None, None]:
                continue  # the result of the last layer
            if None in known or place - known[0] != known[0] - known[1]:
                raise Unalike("outputs of layers have irregular places")
            found.append((place, place - known[0], node))
        return found

    def _markers(self) -> list[fx.Node]:
        """The copies of ``fill_caches``."""
        clone, three = torch.ops.aten.clone.default, self._spans[-1]
        found = self._graph.find_nodes(op="call_function", target=clone)
        return [node for node in found if node.args[0] in three and node not in three]

    def _use_last(
        self, latest: dict[fx.Node, fx.Node], output: list[Any], of_each: set[fx.Node], markers: list[fx.Node]
    ) -> None:
        """Lets code after the layers use the results of the last one, and returns ``output``."""
        if any(node in output for node in markers):
            raise Unalike("a layer does not return what its cache holds")
        three, end = self._spans[-1], self._graph.output_node()
        for node in three:
            for user in list(node.users):
                if user not in three and user is not end and not self._is_of_copy(user):
                    user.replace_input_with(node, latest[node])
        end.args = (tuple(latest[each] if each in latest and each not in of_each else each for each in output),)
        for node in markers:
            self._graph.erase_node(node)

    def _is_of_copy(self, node: fx.Node) -> bool:
        indices = range(self._stack.traced, self._stack.count)
        return any(_is_within(node, f"{self._stack.path}.{index}") for index in indices)


def _is_within(node: fx.Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    return any(_is_in(each, path) for each, _ in stack.values())


def _is_in(path: str, parent: str) -> bool:
    """Whether ``path`` is that of ``parent`` or of a submodule."""
    return f"{path}.".startswith(f"{parent}.")
