"""The call forms of a token model with fewer arguments, from the captured one that has more: the same graph, given
what the model takes for those that are left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor, fx, nn

from ..canonical import drop_true_masks
from ..graph import aten, has_effect
from ..inputs import CallForm, ExampleCall, described
from ..matching import find
from ..patterns import REGISTRY
from ..region import Guard, LiveTensors, Region
from .captured import Capture
from .id_reads import only_looked_up
from .trial_runs import is_faithful, with_few

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
_STANDING_IN = {MASK: aten.ones_like.default, TYPES: aten.zeros_like.default}


def shorter(captured: Capture, call: ExampleCall) -> Capture | None:
    """``captured`` for ``call``, whose arguments are the same but for a mask, token types or both, left out.

    Encoders of transformers take zeros for token types and see every token where there is no mask, so that nothing
    needs to be traced anew. None for other models, where the calls differ in more, where the graph without a mask would
    still compute one, and where the model does more with the ids than look them up: it may make a mask of its own.
    """
    region, names = captured.region, captured.region.call.names
    wanted = [name for name in names if name in call.kwargs]
    absent = [name for name in names if name not in call.kwargs]
    if call.args or not absent or not _STANDING_IN.keys() >= set(absent) or set(call.kwargs) != set(wanted):
        return None
    if IDS not in wanted or not region.call.flat or not _is_of_transformers(captured.module):
        return None
    if TYPES in absent and not _takes_zeros(captured.module):
        return None
    indices = [names.index(name) for name in absent]
    guard, graph = _without(region.guard, indices), _with_stand_ins(region, absent)
    if guard is None or graph is None:
        return None
    arguments = {name: call.kwargs[name] for name in wanted}
    narrowed = replace(
        region,
        graph=graph,
        call=CallForm(captured.module.forward, (), arguments),
        guard=guard,
        inputs=[name for index, name in enumerate(region.inputs) if index not in indices],
        example=described(arguments),
    )
    leaves = list(arguments.values())
    if narrowed.call.names != tuple(wanted) or guard.refusal(leaves) is not None:
        return None
    few = with_few(narrowed, leaves)
    if MASK in absent and not only_looked_up(captured.module, IDS, narrowed.call.keywords(few)):
        return None
    live, findings = LiveTensors(captured.module, narrowed), find(graph, REGISTRY)
    derived = replace(captured, region=narrowed, live=live, leaves=leaves, findings=findings, sites=[])
    return derived if is_faithful(captured.module, narrowed, derived.variant(()).run, few) else None


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _takes_zeros(model: nn.Module) -> bool:
    """Whether ``model`` holds zeros in a buffer, for token types that are left out.

    A run cannot tell it: with the weights or ids at hand other defaults may happen to give the same.
    """
    holders = [module for module in model.modules() if TYPES in module._buffers]
    return bool(holders) and all(
        _is_of_transformers(module) and TYPES in module._non_persistent_buffers_set and not module._buffers[TYPES].any()
        for module in holders
    )


def _with_stand_ins(region: Region, absent: Collection[str]) -> fx.Graph | None:
    """The graph with zeros or ones, as many as there are token ids, for the inputs ``absent``; None where the shapes
    differ, or where ones for a mask do not vanish."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(region.graph, copies))
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    by_name = {name: inputs[placeholder] for name, placeholder in zip(region.call.names, region.inputs)}
    ids, last = by_name[IDS], list(inputs.values())[-1]
    for name in absent:
        given = by_name[name]
        value: Tensor = given.meta["val"]
        if str(value.shape) != str(ids.meta["val"].shape):
            return None
        with graph.inserting_after(last):
            standing_in = graph.call_function(_STANDING_IN[name], (ids,), {"dtype": value.dtype})
        standing_in.meta["val"] = value
        given.replace_all_uses_with(standing_in)
        graph.erase_node(given)
        for user in list(standing_in.users):
            if user.target is aten.sym_size.int:
                user.replace_input_with(standing_in, ids)
        if name == MASK:
            drop_true_masks(graph)
            graph.eliminate_dead_code(has_effect)
            if any(node is standing_in for node in graph.nodes):
                return None
    return graph


def _without(guard: Guard, indices: Collection[int]) -> Guard | None:
    """``guard`` without the arguments at ``indices``; None where those alone show a size."""

    def moved(index: int) -> int:
        return index - sum(place < index for place in indices)

    tensors = [replace(t, index=moved(t.index)) for t in guard.tensors if t.index not in indices]
    shown = set().union(*(getattr(size, "free_symbols", ()) for tensor in tensors for size in tensor.sizes))
    if not guard.ranges.keys() <= shown:
        return None
    constants = [(moved(index), value) for index, value in guard.constants if index not in indices]
    free = {
        name: [(moved(index), dimension) for index, dimension in found if index not in indices]
        for name, found in guard.free.items()
    }
    return Guard(tensors, constants, guard.constraints, guard.ranges, free, set(guard.one_is_safe))
