"""Repeats a traced layer in a graph for the layers that were not traced, see ``alike_layers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..accuracy import is_same_tensor
from ..graph import mark_storage, new_storage, storage_of
from ..inputs import CachePlace
from ..region import Region
from .alike_layers import Stack


class Unalike(Exception):
    """Raised if the traced layers differ in more than their places. The message has the reason."""


def repeat(region: Region, stacks: Sequence[Stack]) -> None:
    """Adds the layers that a shortened model left out to its graph. Raises Unalike."""
    for stack in stacks:
        _Repetition(region, stack).run()
    region.graph.lint()
    region.forget_graph()


class _Repetition:
    def __init__(self, region: Region, stack: Stack):
        self._region, self._stack, self._graph = region, stack, region.graph
        self._placeholders = {node.name: node for node in region.graph.find_nodes(op="placeholder")}
        self._weights = {self._key(name, slot): self._placeholders[name] for name, slot in region.slots.items()}
        self._output = list(self._graph.output_node().args[0])
        self._input_places = dict(zip(region.inputs, region.call.form.places()))
        self._inputs = {place: self._placeholders[name] for name, place in self._input_places.items() if place}
        self._output_places = {place: index for index, place in enumerate(region.outputs.places()) if place}
        #: The places of outputs outside of caches, and the values there.
        self._plain_places = set(range(len(self._output))).difference(self._output_places.values())
        self._returned = {self._output[place] for place in self._plain_places}
        #: The nodes of each layer after the first, in the same order for all layers of a kind.
        self._spans: dict[int, list[fx.Node]] = {index: [] for index in range(1, stack.traced)}
        paths = {index: f"{stack.path}.{index}" for index in self._spans}
        for node in self._graph.nodes:
            if node.op != "placeholder" and not _is_size(node):
                for index, path in paths.items():
                    if _is_within(node, path):
                        self._spans[index].append(node)
        for index in self._spans:
            self._take_sources(index)
        self._layer = {node: index for index, span in self._spans.items() for node in span}

    def _take_sources(self, index: int) -> None:
        """Adds values from outside that only layer ``index`` uses, such as copies of its states, to its nodes. Without
        another layer of its kind, later ones may use the same value, unless it depends on the layer's cache."""
        found = set(self._spans[index])
        own = {node for place, node in self._inputs.items() if place.layer == index}
        for node in self._graph.nodes:
            if not own.isdisjoint(node.all_input_nodes):
                own.add(node)
        is_alone = self._stack.kinds[1 : self._stack.traced].count(self._stack.kinds[index]) == 1
        for node in reversed(self._graph.nodes):
            is_source = node.op == "call_function" and node.users and found.issuperset(node.users)
            if is_source and not _is_within(node, self._stack.path) and (node in own or not is_alone):
                found.add(node)
        self._spans[index] = [node for node in self._graph.nodes if node in found]

    def run(self) -> None:
        stack, spans = self._stack, self._spans
        if not any(spans.values()):
            return  # this call does not use the layers
        templates = sorted({stack.template(index) for index in range(stack.traced, stack.count)})
        known = {index: self._counterparts(index) for index in spans}
        self._markers = self._copies_of({node for index in templates for node in spans[index]})
        self._exports = self._exported()
        self._check_users()
        sources = {index: self._sources(index, known[index]) for index in templates}
        cursor = max((span[-1] for span in spans.values() if span), key=[*self._graph.nodes].index)
        for index in range(stack.traced, stack.count):
            template = stack.template(index)
            for name, (path, attribute) in list(self._region.slots.items()):  # also those that no operator reads
                if _is_in(path, f"{stack.path}.{template}"):
                    inside = path.removeprefix(f"{stack.path}.{template}")
                    self._weight(self._placeholders[name], template, index, (inside, attribute))
            found = {each: self._found(source, each, template, index) for each, source in sources[template].items()}
            storages = {storage_of(each): storage_of(other) for each, other in found.items()}
            spans[index] = []
            for node in spans[template]:
                cursor = found[node] = self._copied(node, found, storages, cursor, template, index)
                spans[index].append(cursor)
            for place, at in self._output_places.items():
                if place.layer == template and self._output[at] in spans[template]:
                    self._output[self._output_places[place.of(index)]] = found[self._output[at]]
        self._use_last()

    def _counterparts(self, index: int) -> dict[fx.Node, fx.Node]:
        """The values outside of layer ``index`` that it uses, and those that an earlier traced layer of its kind uses
        instead; these values themselves where there is none. Compares both layers."""
        kinds, span = self._stack.kinds, self._spans[index]
        earlier = [each for each in self._spans if each < index and kinds[each] == kinds[index]]
        ours = self._spans[earlier[-1]] if earlier else span
        if len(ours) != len(span):
            raise Unalike("layers have different numbers of operators")
        inner, outer = dict(zip(span, ours)), dict[fx.Node, fx.Node]()
        for node, other in inner.items():
            given, others = ([*pytree.tree_leaves((each.args, each.kwargs))] for each in (node, other))
            alike = (node.op, node.target) == (other.op, other.target) and len(given) == len(others)
            if not alike or isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "get_attr":
                raise Unalike(f"{node.name} and {other.name} differ")
            for value, its in zip(given, others):
                if isinstance(value, fx.Node) and isinstance(its, fx.Node):
                    expected = inner[value] if value in inner else outer.setdefault(value, its)
                    if expected is not its:
                        raise Unalike(f"{node.name} and {other.name} have different inputs")
                elif type(value) is not type(its) or value != its:
                    raise Unalike(f"{node.name} and {other.name} have different arguments")
        return outer

    def _exported(self) -> dict[int, list[int]]:
        """For each kind, which nodes of a layer the next layer uses, or for the last traced one, code after it. All
        layers export as many."""
        found: dict[int, list[int]] = {}
        for index, span in self._spans.items():
            following = set(self._spans.get(index + 1, ()))
            is_last = index + 1 == self._stack.traced
            if is_last and self._stack.kinds[index] in found:
                continue
            exports = [place for place, node in enumerate(span) if self._is_result(node, span, following)]
            if found.setdefault(self._stack.kinds[index], exports) != exports:
                raise Unalike("the next layer uses other results of a layer than of another one")
        if len({len(exports) for exports in found.values()}) > 1:
            raise Unalike("layers of different kinds have different numbers of results")
        return found

    def _is_result(self, node: fx.Node, span: list[fx.Node], following: set[fx.Node]) -> bool:
        if following:
            return not following.isdisjoint(node.users)
        users = [user for user in node.users if user not in span and user not in self._markers]
        return node in self._returned or any(user.op != "output" for user in users)

    def _sources(self, index: int, outer: dict[fx.Node, fx.Node]) -> dict[fx.Node, Any]:
        """Where later layers find the values that the traced layer ``index`` uses: the place of a weight in the layer,
        the place in a cache, or the result of the layer before, as a node; None for the same value."""
        region, path = self._region, f"{self._stack.path}.{index}"
        found: dict[fx.Node, Any] = {}
        for value, its in outer.items():
            slot = region.slots.get(value.name)
            if slot is not None and _is_in(slot[0], path):
                found[value] = slot[0].removeprefix(path), slot[1]
            elif self._layer.get(value) == index - 1:
                found[value] = value
            elif value in self._layer or (index == 1 and _is_within(value, f"{self._stack.path}.0")):
                raise Unalike(f"layer {index} uses {value.name}, which other layers may not have")
            elif (place := self._input_places.get(value.name)) is not None and place.layer == index:
                found[value] = place
            elif value is its or self._are_equal(value, its):
                found[value] = None
            else:
                raise Unalike(f"{value.name} and {its.name} do not correspond")
        return found

    def _are_equal(self, value: fx.Node, following: fx.Node) -> bool:
        if _is_size(value) and _is_size(following):
            return str(value.meta["val"]) == str(following.meta["val"])
        ours, theirs = (self._region.constants.get(each.name) for each in (value, following))
        if ours is None or theirs is None:
            return False
        return ours.stride() == theirs.stride() and is_same_tensor(ours, theirs)

    def _found(self, source: Any, node: fx.Node, template: int, index: int) -> fx.Node:
        kinds = self._stack.kinds
        if source is None:
            return node
        if isinstance(source, fx.Node):
            place = self._spans[template - 1].index(source)
            if kinds[template - 1] != kinds[index - 1]:
                place = self._exports[kinds[index - 1]][self._exports[kinds[template - 1]].index(place)]
            return self._spans[index - 1][place]
        if isinstance(source, CachePlace):
            return self._inputs[source.of(index)]
        return self._weight(node, template, index, source)

    def _weight(self, node: fx.Node, template: int, index: int, inside: tuple[str, str]) -> fx.Node:
        """The placeholder of a weight of the layer ``index``, which is like ``node`` of ``template``."""
        region, layer = self._region, f"{self._stack.path}.{index}"
        slot = layer + inside[0], inside[1]
        key = self._key(node.name, slot)
        if key not in self._weights:
            old, new = (path.replace(".", "_").lower() for path in (f"{self._stack.path}.{template}", layer))
            with self._graph.inserting_after(node):
                own = node.name.replace(old, new, 1)
                made = self._graph.create_node("placeholder", own, name=own)
            made.meta = dict(node.meta)
            mark_storage(made, new_storage())
            self._weights[key] = self._placeholders[made.name] = made
            region.slots[made.name] = slot
            if node.name in region.casted:
                region.casted[made.name] = region.casted[node.name]
            if node.name in region.inner:
                region.inner[made.name] = region.inner[node.name]
            if node.name in region.shards:
                region.shards |= {made.name}
        return self._weights[key]

    def _key(self, name: str, slot: tuple[str, str]) -> Any:
        """Identifies the weight at ``slot``, or what is made or read from it, as the placeholder ``name`` does."""
        return slot, self._region.inner.get(name), self._region.casted.get(name)

    def _copied(
        self,
        node: fx.Node,
        found: dict[fx.Node, fx.Node],
        storages: dict[Any, Any],
        cursor: fx.Node,
        template: int,
        index: int,
    ) -> fx.Node:
        """Copies ``node`` of the layer ``template`` after ``cursor`` for the layer ``index``. Its traced value has the
        same properties, but another storage."""
        with self._graph.inserting_after(cursor):
            made = self._graph.node_copy(node, found.__getitem__)
        made.meta = dict(node.meta)
        storage = storage_of(node)
        if storage is not None:
            if storage not in storages:
                storages[storage] = new_storage()
            mark_storage(made, storages[storage])
        old, new = (f"{self._stack.path}.{each}" for each in (template, index))
        made.meta["nn_module_stack"] = {
            key: (new + path.removeprefix(old) if _is_in(path, old) else path, kind)
            for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items()
        }
        return made

    def _check_users(self) -> None:
        """Raises Unalike if code after the layers uses results of others than the last one, which it may count from
        the end."""
        for node in self._graph.nodes:
            is_last = self._layer.get(node) == self._stack.traced - 1
            if is_last or _is_size(node) or not _is_within(node, self._stack.path):
                continue
            users = [user for user in node.users if user.op != "output" and user not in self._markers]
            inside = all(user in self._layer or _is_within(user, self._stack.path) for user in users)
            if not inside or node in self._returned:
                raise Unalike("code after the layers uses results of each")

    def _copies_of(self, among: set[fx.Node]) -> list[fx.Node]:
        """The copies of nodes ``among`` these that ``shortened`` gives to caches."""
        clone = torch.ops.aten.clone.default
        found = self._graph.find_nodes(op="call_function", target=clone)
        return [node for node in found if node.args[0] in among and node not in self._layer]

    def _use_last(self) -> None:
        """Lets code after the layers use the results of the last one, and returns the outputs."""
        if any(node in self._output for node in self._markers):
            raise Unalike("a layer does not return what its cache holds")
        kinds, traced, end = self._stack.kinds, self._stack.traced, self._graph.output_node()
        last = self._spans[self._stack.count - 1]

        def latest(place: int) -> fx.Node:
            if kinds[traced - 1] != kinds[-1]:
                exports = self._exports[kinds[traced - 1]]
                if place not in exports:
                    raise Unalike("code after the layers uses a result that other layers do not have")
                place = self._exports[kinds[-1]][exports.index(place)]
            return last[place]

        made = {node for index in range(traced, self._stack.count) for node in self._spans[index]}
        for place, node in enumerate(self._spans[traced - 1]):
            users = [user for user in node.users if user not in self._layer and user not in made and user is not end]
            for user in users:
                if user not in self._markers:
                    user.replace_input_with(node, latest(place))
            for at in self._plain_places:
                if self._output[at] is node:
                    self._output[at] = latest(place)
        end.args = (tuple(self._output),)
        for node in self._markers:
            self._graph.erase_node(node)


def _is_size(node: fx.Node) -> bool:
    """Whether ``node`` computes with sizes of arguments: layers share the result, or each one computes it."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


def _is_within(node: fx.Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    return any(_is_in(each, path) for each, _ in stack.values())


def _is_in(path: str, parent: str) -> bool:
    """Whether ``path`` is that of ``parent`` or of a submodule."""
    return f"{path}.".startswith(f"{parent}.")
