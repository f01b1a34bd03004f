"""Puts fused modules in the place of matches: a Region and its sites to a Program that runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn

from ..canonical import settled_layouts, unsettled
from ..graph import (
    Aliases,
    aliased_arguments,
    arguments,
    aten,
    draws,
    has_effect,
    is_laid_out,
    is_marked_view,
    is_weight,
    lower,
    marked_order,
    order_in_memory,
    written_by_layout,
)
from ..region import LiveTensors, Place, Region
from ..runtime import Program
from .pattern import Replacement
from .site import Site


def rewrite(region: Region, sites: Iterable[Site], live: LiveTensors, channels_last: bool = False) -> Program:
    """The program of ``region`` with the module of every site in ``sites`` in place of what it matched.

    ``channels_last``: the sites' modules may return channels-last images; outputs of the region, and what they are
    views of, are then brought back to the layout that the original returns. So is what the graph writes in place, where
    the layout decides whether a write reaches it: a reshape that is a view of a contiguous image copies a channels-last
    one, and a write would miss the image.
    """
    graph = fx.Graph()
    copies = _placeholders(graph, region)
    output = graph.output(graph.graph_copy(region.graph, copies))
    root = {node.target: getattr(region.root, node.target) for node in region.graph.nodes if node.op == "get_attr"}
    synced, fused = [], []
    sites = list(sites)
    for index, site in enumerate(sites):
        name = f"fused_{index}"
        fused.append(name)
        root[name] = site.replacement.module
        _call_fused(graph, name, site, copies)
        synced += _share(site.replacement, live)
    settled = settled_layouts(region.graph)
    anew = _behind([site for site in sites if channels_last or _lays_out_anew(site)], region.graph, set())
    as_fused = anew | _behind(sites, region.graph, settled)
    written = written_by_layout(region.graph)
    _restore_layout(graph, output, region, copies, sites, anew, written)
    behind = _readers_behind(region.graph, sites, as_fused, written)
    _keep_layout_of_arguments(graph, channels_last, copies, as_fused, behind)
    laid_out = _fail_alike(region, bool(sites), behind, copies, settled)
    _lay_out_marked(graph, output, region, copies)
    graph.eliminate_dead_code(lambda node: node.op != "call_module" and has_effect(node))
    if region.takes_static_cache:
        _write_in_place(graph, root)
    weights = _drop_unused_weights(graph, copies, live)
    lower(graph)
    graph.lint()
    images = tuple(tensor.index for tensor in region.guard.tensors if len(tensor.sizes) >= 4)
    made = fx.GraphModule(root, graph).eval()
    return Program(live.model, made, fused, weights, synced, images, laid_out, live.shards())


# What generated code means by these names; an argument of the model may have one of them.
_GLOBALS = frozenset(("NoneType", "device", "fx_pytree", "inf", "nan", "pytree", "torch"))


def _placeholders(graph: fx.Graph, region: Region) -> dict[fx.Node, fx.Node]:
    """Placeholders in ``graph`` for those of ``region``, which hide no global name of the generated code."""
    copies = {}
    for node in region.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"{node.name}_argument" if node.name in _GLOBALS else node.name)
            copies[node].meta = dict(node.meta)
    return copies


def _call_fused(graph: fx.Graph, name: str, site: Site, copies: dict[fx.Node, fx.Node]) -> None:
    inputs = tuple(copies[node] for node in site.replacement.inputs)
    # Right after its last input: outputs other than the root may be used before the place of the root.
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
    return next((node for node in reversed(graph.nodes) if node.op == "placeholder" or node in nodes), None)


def _share(replacement: Replacement, live: LiveTensors) -> list[tuple[Place, Place]]:
    """Make the fused module read the model's tensors where they live.

    Where all tensors of a holder live under the same names in one owner, the holder takes over the owner's very
    dict, so that it sees whatever is assigned there later. The others are returned: to be copied before each run.
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
            # A tensor that is a plain attribute lies in no dict of tensors.
            if isinstance(owner, dict) and len(owners) == 1 and all(name == key for name, _, key in places):
                # A parameter that the graph does not read must not come along (a linear without its bias). A buffer
                # may: the batch counter tells the fused module that running statistics were written.
                if kind == "_buffers" or all(n in owner and owner[n] is t for n, t in store.items()):
                    bindings[0][0].__dict__[kind] = owner
                    continue
            synced += [((owner, key), (store, name)) for name, owner, key in places]
    return synced


def _lays_out_anew(site: Site) -> bool:
    """Whether the results of its module may lie otherwise in memory than those of the original."""
    module: Any = site.replacement.module
    return module.lays_out_anew or not (module.keeps_order or all(map(_is_contiguous, site.replacement.outputs)))


def _behind(sites: list[Site], graph: fx.Graph, settled: set[fx.Node]) -> set[fx.Node]:
    """The values of ``graph``, but for those that are ``settled``, that lie in memory as a module of ``sites`` has it:
    its results, and what is computed from these."""
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
) -> None:
    """Lay out as in the trace what is returned, and what is ``written`` through operators that look at its layout,
    where it may lie otherwise, as fused modules lay out ``anew`` what it is computed from."""
    computed = {node for site in sites for node in site.replacement.outputs}
    returned = region.graph.output_node().all_input_nodes
    aliases = Aliases(region.graph)
    classes = {aliases.root(value): aliases.members(value) for value in (*returned, *written)}
    for members in classes.values():
        # An input, or a view of one, is returned as it came.
        if any(member.op == "placeholder" for member in members):
            continue
        made = _made(members, computed)
        readers = {output, *(copies[member] for member in members if member not in made)}
        for member in made:
            if member in anew and not marked_order(member):
                # A write must reach all that read the value; else other users get the image as it is.
                _lay_out_value(graph, copies[member], None if aliases.is_written(member) else readers)


def _lay_out_marked(graph: fx.Graph, output: fx.Node, region: Region, copies: dict[fx.Node, fx.Node]) -> None:
    """Return what the model lays out otherwise than the trace tells as the model does."""
    for node in region.graph.output_node().all_input_nodes:
        order = marked_order(node)
        if order is not None:
            with graph.inserting_before(output):
                output.replace_input_with(copies[node], _laid_out(graph, copies[node], order))


def _write_in_place(graph: fx.Graph, root: dict[str, Any]) -> None:
    """Let what is put into a copy of a static cache be put into that cache itself, which holds the same after each call
    with the same arguments."""
    for node in graph.nodes:
        caches = getattr(root.get(node.target), "caches", ()) if node.op == "call_module" else ()
        if node.target is aten.index_copy.default and _is_own(node.args[0], node):
            node.target = aten.index_copy_.default
        elif caches:
            root[node.target].in_place = all(_is_own(node.args[index], node) for index in caches)


def _is_own(cache: fx.Node, writer: fx.Node) -> bool:
    """Whether ``cache`` is an argument that nobody reads but ``writer``."""
    readers = [user for user in cache.users if user is not writer and user.target is not aten.sym_size.int]
    return cache.op == "placeholder" and not is_weight(cache) and not readers


def _made(members: list[fx.Node], computed: set[fx.Node]) -> list[fx.Node]:
    """Those of values that may share memory which are no views of others among them: the first; or what fused modules
    compute, where an operator within these wrote in place; or the items of the operator's tuple."""
    fused = [member for member in members if member in computed]
    if fused or isinstance(members[0].meta.get("val"), Tensor):
        return fused or members[:1]
    return [member for member in members if members[0] in member.args]


# Operators whose results depend on where elements lie in memory: the order in which they draw, or whether they raise.
_OF_MEMORY = (
    aten.view_as_complex.default,
    aten.view.dtype,
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)


def _readers_behind(graph: fx.Graph, sites: list[Site], as_fused: set[fx.Node], written: list[fx.Node]) -> set[fx.Node]:
    """The views that may fail, the operators that look at memory, and those that are ``written`` through, whose
    argument lies ``as_fused`` modules have it, or which are within such a module. All others find in the program what
    they find in the original, for inputs of any layout."""
    covered = {node for site in sites for node in site.match.nodes}
    return {
        node
        for node in graph.nodes
        if (is_marked_view(node) or _reads_layout(node) or node in written)
        and (node in covered or not as_fused.isdisjoint(node.all_input_nodes))
    }


def _keep_layout_of_arguments(
    graph: fx.Graph,
    channels_last: bool,
    copies: dict[fx.Node, fx.Node],
    as_fused: set[fx.Node],
    behind: set[fx.Node],
) -> None:
    """Give arguments that lie ``as_fused`` modules have it the layout that they were traced with where it matters: to
    operators ``behind`` these that draw, or look at memory, and to batch norms without running statistics behind
    ``channels_last`` images: ATen sums these in float32, which triples the error where a channel varies little around a
    large mean."""
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
    return node.target in _OF_MEMORY or (node.op == "call_function" and draws(node))


def _base(node: fx.Node) -> fx.Node:
    """The value that ``node`` is a view of, itself for other values."""
    while True:
        viewed = [each for each in aliased_arguments(node) if isinstance(each.meta.get("val"), Tensor)]
        if not viewed:
            return node
        node = viewed[0]


def _lay_out_value(graph: fx.Graph, value: fx.Node, readers: set[fx.Node] | None = None) -> None:
    """Let ``readers``, or all users, read ``value`` as it lay in the trace."""
    order = None if value.op == "placeholder" else order_in_memory(value.meta.get("val"))
    if order is not None:
        readers = set(value.users) if readers is None else readers
        with graph.inserting_before(value.next):
            restored = _laid_out(graph, value, order)
        restored.meta = dict(value.meta)
        value.replace_all_uses_with(restored, readers.__contains__)


def _fail_alike(
    region: Region, has_sites: bool, behind: set[fx.Node], copies: dict[fx.Node, fx.Node], settled: set[fx.Node]
) -> tuple[int, ...]:
    """Let views fail in the program where they do in the original, for other layouts of the inputs than that of the
    example. Returned is which of the flat inputs have to lie as in the example, as fused modules stand between these
    and a view, or an operator that looks at memory, which is ``behind`` them."""
    found = {node for node in region.graph.nodes if is_laid_out(node)}
    if has_sites and region.is_read_by_layout:
        found.update(node for node in region.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    for node in region.graph.nodes:
        if node in behind:
            found.update(each for each in unsettled(node, settled) if each.op == "placeholder")
        elif is_marked_view(node):
            copies[node].target = aten.view_as.default if node.target is aten.reshape_as.default else aten.view.default
    names = {node.name for node in found}
    return tuple(index for index, name in enumerate(region.inputs) if name in names)


def _laid_out(graph: fx.Graph, value: fx.Node, order: list[int]) -> fx.Node:
    """``value``, with its dimensions in memory in this order; itself, not a copy, where it has it."""
    if order == sorted(order):
        return graph.call_function(aten.contiguous.default, (value,))
    permuted = graph.call_function(aten.permute.default, (value, order))
    dense = graph.call_function(aten.contiguous.default, (permuted,))
    return graph.call_function(aten.permute.default, (dense, [order.index(dim) for dim in range(len(order))]))


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_contiguous()


def _drop_unused_weights(graph: fx.Graph, copies: dict[fx.Node, fx.Node], live: LiveTensors) -> list[Place]:
    """Erase the placeholders of tensors that only fused modules read; return where the others live, in order."""
    weights = []
    for original, copied in copies.items():
        if original.op != "placeholder" or not is_weight(original):
            continue
        if copied.users:
            weights.append(live.store(original))
        else:
            graph.erase_node(copied)
    return weights
