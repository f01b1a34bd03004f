"""Replaces matches with fused modules: turns a Region and its sites into an executable Program."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn

from ..canonical import settled_layouts, unsettled
from ..graph import (
    LAYOUT_READERS,
    Aliases,
    aliased_arguments,
    arguments,
    aten,
    draws,
    has_effect,
    is_laid_out,
    is_weight,
    lower,
    marked_order,
    order_in_memory,
    written_by_layout,
)
from ..region import LiveTensors, Place, Region
from ..runtime import Program
from .computed_once import compute_once
from .joined_calls import Join, join_calls
from .pattern import Replacement
from .shared_calls import share_calls
from .site import Site


def rewrite(
    region: Region,
    sites: Iterable[Site],
    live: LiveTensors,
    channels_last: bool = False,
    once: bool = True,
    join: Join | None = None,
) -> Program:
    """Returns the program of ``region`` in which the module of each site replaces its match.

    ``channels_last``: the sites' modules may return channels-last images. Outputs of the region, and the bases of
    views among them, are then converted back to the original memory layout. In-place written values are converted if
    their layout decides whether a write reaches them: a reshape is a view of a contiguous image but copies a
    channels-last one.
    ``once``: what depends on weights alone is computed once, see ``compute_once``, and equal calls are one call.
    ``join``: returns one module for norms and their only reader, see ``join_calls``.
    """
    graph = fx.Graph()
    copies = _placeholders(graph, region)
    output = graph.output(graph.graph_copy(region.graph, copies))
    root = {node.target: getattr(region.root, node.target) for node in region.graph.nodes if node.op == "get_attr"}
    synced = []
    sites = list(sites)
    for index, site in enumerate(sites):
        name = f"fused_{index}"
        root[name] = site.replacement.module
        _call_fused(graph, name, site, copies)
        synced += _share(site.replacement, live)
    settled = settled_layouts(region.graph)
    anew = _behind([site for site in sites if channels_last or _lays_out_anew(site)], region.graph, set())
    as_fused = anew | _behind(sites, region.graph, settled)
    aliases = Aliases(region.graph)
    written = written_by_layout(region.graph, aliases)
    _restore_layout(graph, output, region, copies, sites, anew, written, aliases)
    behind = _readers_behind(region.graph, sites, as_fused, written)
    _keep_layout_of_arguments(graph, channels_last, copies, as_fused, behind)
    laid_out = _laid_out_inputs(region, behind, settled)
    _lay_out_marked(graph, output, region, copies)
    graph.eliminate_dead_code(lambda node: node.op != "call_module" and has_effect(node))
    if region.takes_static_cache:
        _write_in_place(graph, root)
    if join is not None:
        join_calls(graph, root, join)
    if once:
        share_calls(graph, copies, aliases)
    # A write to a distributed parameter leaves no trace in its shard.
    if once and not region.shards:
        compute_once(graph, root, copies, live, aliases)
    fused = [node.target for node in graph.find_nodes(op="call_module")]
    weights = _drop_unused_weights(graph, copies, live)
    lower(graph)
    graph.lint()
    images = tuple(tensor.index for tensor in region.guard.tensors if len(tensor.sizes) >= 4)
    made = fx.GraphModule(root, graph).eval()
    return Program(
        live.model, made, fused, weights, synced, images, laid_out, live.inner(), _unread(region, live), live.casts()
    )


# Global names in generated code. Arguments of the model may have the same names.
_GLOBALS = frozenset(("NoneType", "device", "fx_pytree", "inf", "nan", "pytree", "torch"))


def _placeholders(graph: fx.Graph, region: Region) -> dict[fx.Node, fx.Node]:
    """Copies the placeholders of ``region`` to ``graph``, with names that hide no global of generated code."""
    copies = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"{node.name}_argument" if node.name in _GLOBALS else node.name)
            copies[node].meta = dict(node.meta)
    return copies


def _call_fused(graph: fx.Graph, name: str, site: Site, copies: dict[fx.Node, fx.Node]) -> None:
    inputs = tuple(copies[node] for node in site.replacement.inputs)
    # Right after its last input, because outputs other than the root may be used before the root.
    with graph.inserting_after(_last(graph, inputs)):
        call = graph.call_module(name, inputs)
    outputs = site.replacement.outputs
    results = [call]
    if len(outputs) > 1:
        with graph.inserting_after(call):
            results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(outputs))]
    for original, result in zip(outputs, results):
        result.meta = dict(original.meta)
        copies[original].replace_all_uses_with(result)
        copies[original] = result


def _last(graph: fx.Graph, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
    """Returns the last of ``nodes`` that is a call, else the last placeholder of ``graph``; None if it has none."""
    calls = [node for node in nodes if node.op != "placeholder"]
    return max(calls or graph.find_nodes(op="placeholder"), default=None)


def _share(replacement: Replacement, live: LiveTensors) -> list[tuple[Place, Place]]:
    """Makes the fused module read the model's tensors from their owners.

    If all tensors of a holder have the same names in one owner, the holder shares the owner's dict, so later
    assignments take effect. The other tensors are returned, and must be copied before each run.
    """
    synced = []
    by_holder: dict[int, list[tuple[nn.Module, str, fx.Node]]] = {}
    for binding in replacement.bindings:
        by_holder.setdefault(id(binding[0]), []).append(binding)
    for bindings in by_holder.values():
        for kind in ("_parameters", "_buffers"):
            store = bindings[0][0].__dict__[kind]
            places = [(name, *live.store(node)) for _, name, node in bindings if name in store]
            owners = {id(owner) for _, owner, _ in places}
            owner = places[0][1] if places else None
            # A plain attribute is not in a dict of parameters or buffers.
            if isinstance(owner, dict) and len(owners) == 1 and all(name == key for name, _, key in places):
                # The dict must not have parameters that the graph does not read (a linear without its bias). Other
                # buffers are allowed: a changed batch counter signals new running statistics.
                if kind == "_buffers" or all(n in owner and owner[n] is t for n, t in store.items()):
                    bindings[0][0].__dict__[kind] = owner
                    continue
            synced += [((owner, key), (store, name)) for name, owner, key in places]
    return synced


def _lays_out_anew(site: Site) -> bool:
    """Whether its module may return another memory layout than the original."""
    module: Any = site.replacement.module
    return module.lays_out_anew or not (module.keeps_order or all(map(_is_contiguous, site.replacement.outputs)))


def _behind(sites: list[Site], graph: fx.Graph, settled: set[fx.Node]) -> set[fx.Node]:
    """The values of ``graph``, except ``settled`` ones, whose memory layout depends on a module of ``sites``: its
    results, and values computed from them."""
    covered = {node for site in sites for node in site.match.nodes}
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in settled and (node in covered or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _restore_layout(
    graph: fx.Graph,
    output: fx.Node,
    region: Region,
    copies: dict[fx.Node, fx.Node],
    sites: list[Site],
    anew: set[fx.Node],
    written: list[fx.Node],
    aliases: Aliases,
) -> None:
    """Restores the traced memory layout of returned values, and values ``written`` through layout-dependent operators.
    Only values computed from ``anew``, whose layout fused modules may change, need this."""
    computed = {node for site in sites for node in site.replacement.outputs}
    returned = region.graph.output_node().all_input_nodes
    classes = {aliases.root(value): aliases.members(value) for value in (*returned, *written)}
    for members in classes.values():
        # Inputs and their views keep their layout.
        if any(member.op == "placeholder" for member in members):
            continue
        made = _made(members, computed)
        readers = {output, *(copies[member] for member in members if member not in made)}
        for member in made:
            if member in anew and not marked_order(member):
                # A write must reach all readers of the value. Without a write, other users read the image unchanged.
                _lay_out_value(graph, copies[member], None if aliases.is_written(member) else readers)


def _lay_out_marked(graph: fx.Graph, output: fx.Node, region: Region, copies: dict[fx.Node, fx.Node]) -> None:
    """Restores the model's memory layout of outputs for which it differs from the trace."""
    for node in region.graph.output_node().all_input_nodes:
        order = marked_order(node)
        if order is not None:
            with graph.inserting_before(output):
                output.replace_input_with(copies[node], _laid_out(graph, copies[node], order))


def _write_in_place(graph: fx.Graph, root: dict[str, Any]) -> None:
    """Writes to a static cache in place instead of to a copy. Repeated calls with the same arguments then leave the
    same values."""
    for node in graph.nodes:
        caches = getattr(root.get(node.target), "caches", ()) if node.op == "call_module" else ()
        if node.target is aten.index_copy.default and _is_own(node.args[0], node):
            node.target = aten.index_copy_.default
        elif caches:
            root[node.target].in_place = all(_is_own(node.args[index], node) for index in caches)


def _is_own(cache: fx.Node, writer: fx.Node) -> bool:
    """Whether ``cache`` is an argument that only ``writer`` reads."""
    readers = [user for user in cache.users if user is not writer and user.target is not aten.sym_size.int]
    return cache.op == "placeholder" and not is_weight(cache) and not readers


def _made(members: list[fx.Node], computed: set[fx.Node]) -> list[fx.Node]:
    """The base values among ``members``, which may share memory: the first; or the results of fused modules, if an
    operator in them wrote in place; or the items of the operator's tuple."""
    fused = [member for member in members if member in computed]
    if fused or isinstance(members[0].meta.get("val"), Tensor):
        return fused or members[:1]
    return [member for member in members if members[0] in member.args]


def _readers_behind(graph: fx.Graph, sites: list[Site], as_fused: set[fx.Node], written: list[fx.Node]) -> set[fx.Node]:
    """Layout-dependent operators, and operators that are ``written`` through. They must have an argument in
    ``as_fused`` (layout of fused modules) or be in a fused module. All other operators read the original layout for any
    inputs."""
    covered = {node for site in sites for node in site.match.nodes}
    return {
        node
        for node in graph.nodes
        if (_reads_layout(node) or node in written)
        and (node in covered or not as_fused.isdisjoint(node.all_input_nodes))
    }


def _keep_layout_of_arguments(
    graph: fx.Graph, channels_last: bool, copies: dict[fx.Node, fx.Node], as_fused: set[fx.Node], behind: set[fx.Node]
) -> None:
    """Restores the traced layout of arguments ``as_fused`` if it matters: for operators ``behind`` them that draw
    numbers or depend on the layout, and for batch norms without running statistics on ``channels_last`` images. ATen
    sums the latter in float32, which triples the error of channels with a small variance around a large mean."""
    readers, arguments_of_fused = ({copies[node] for node in nodes if node in copies} for nodes in (behind, as_fused))
    for node in list(graph.nodes):
        summed = channels_last and node.target is aten.batch_norm.default and arguments(node)[5]
        if not (summed or node in readers and _reads_layout(node)):
            continue
        for argument in node.all_input_nodes:
            if argument not in arguments_of_fused:
                continue
            base = _base(argument)
            if base is not argument and order_in_memory(argument.meta.get("val")) is None:
                _lay_out_value(graph, base)  # the view has gaps
            order = order_in_memory(argument.meta.get("val"))
            if order is not None:
                with graph.inserting_before(node):
                    node.replace_input_with(argument, _laid_out(graph, argument, order))


def _reads_layout(node: fx.Node) -> bool:
    return node.target in LAYOUT_READERS or (node.op == "call_function" and draws(node))


def _base(node: fx.Node) -> fx.Node:
    while True:
        viewed = [each for each in aliased_arguments(node) if isinstance(each.meta.get("val"), Tensor)]
        if not viewed:
            return node
        node = viewed[0]


def _lay_out_value(graph: fx.Graph, value: fx.Node, readers: set[fx.Node] | None = None) -> None:
    """Converts ``value`` to its traced layout for ``readers`` or for all users."""
    order = None if value.op == "placeholder" else order_in_memory(value.meta.get("val"))
    if order is not None:
        readers = set(value.users) if readers is None else readers
        with graph.inserting_before(value.next):
            restored = _laid_out(graph, value, order)
        restored.meta = dict(value.meta)
        value.replace_all_uses_with(restored, readers.__contains__)


def _laid_out_inputs(region: Region, behind: set[fx.Node], settled: set[fx.Node]) -> tuple[int, ...]:
    """Returns the flat inputs that must have the example's layout: those that views depend on, which may raise for
    others, and those that fused modules separate from a layout-dependent operator ``behind`` them."""
    found = {node for node in region.graph.nodes if is_laid_out(node)}
    if region.has_fixed_layouts:
        found.update(node for node in region.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    for node in behind:
        found.update(each for each in unsettled(node, settled) if each.op == "placeholder")
    names = {node.name for node in found}
    return tuple(index for index, name in enumerate(region.inputs) if name in names)


def _unread(region: Region, live: LiveTensors) -> list[Place]:
    """Returns the places of tensors with which the graph does not compute, but whose properties, such as the shape, the
    code may read."""
    found = []
    for node in region.graph.nodes:
        if node.name in region.slots and not node.users:
            path, name = region.slots[node.name]
            if (type(live.model.get_submodule(path)), name) in region.reads:
                found.append(live.store(node))
    return found


def _laid_out(graph: fx.Graph, value: fx.Node, order: list[int]) -> fx.Node:
    """Converts ``value`` to a layout with this order of dimensions in memory, without a copy if it already has it."""
    if order == sorted(order):
        return graph.call_function(aten.contiguous.default, (value,))
    permuted = graph.call_function(aten.permute.default, (value, order))
    dense = graph.call_function(aten.contiguous.default, (permuted,))
    return graph.call_function(aten.permute.default, (dense, [order.index(dim) for dim in range(len(order))]))


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def _drop_unused_weights(graph: fx.Graph, copies: dict[fx.Node, fx.Node], live: LiveTensors) -> list[Place]:
    """Erases the placeholders of tensors that only fused modules read. Returns the places of the others, in order."""
    weights = []
    for original, copied in copies.items():
        if original.op != "placeholder" or not is_weight(original):
            continue
        if copied.users:
            weights.append(live.store(original))
        else:
            graph.erase_node(copied)
    return weights
