"""The call form without ``token_type_ids``, from the captured one that has them: the same graph, given zeros."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn

from .calls import CallForm
from .capture import Capture
from .guard import Guard
from .inputs import ExampleCall
from .matcher import find
from .patterns import REGISTRY
from .probing import is_faithful, with_few
from .rewriter import LiveTensors
from .tracer import Region, described

NAME = "token_type_ids"


def without_token_types(captured: Capture, call: ExampleCall) -> Capture | None:
    """``captured`` for ``call``, whose arguments are the same but for the token types.

    Models of the BERT family take zeros for token types that are left out, so that nothing needs to be traced anew.
    None for other models, and where the calls differ in more.
    """
    region, names = captured.region, captured.region.call.names
    wanted = [name for name in names if name != NAME]
    if call.args or len(wanted) == len(names) or set(call.kwargs) != set(wanted) or not region.call.flat:
        return None
    if not _takes_zeros(captured.module):
        return None
    arguments = {name: call.kwargs[name] for name in wanted}
    place = names.index(NAME)
    guard = _without(region.guard, place)
    if guard is None:
        return None
    narrowed = replace(
        region,
        graph=_with_zeros(region, place),
        call=CallForm(captured.module.forward, (), arguments),
        guard=guard,
        inputs=[name for index, name in enumerate(region.inputs) if index != place],
        example=described(arguments),
    )
    leaves = list(arguments.values())
    if narrowed.call.names != tuple(wanted) or guard.refusal(leaves) is not None:
        return None
    live, findings = LiveTensors(captured.module, narrowed), find(narrowed.graph, REGISTRY)
    derived = replace(captured, region=narrowed, live=live, leaves=leaves, findings=findings, sites=[])
    few = with_few(narrowed, leaves)
    return derived if is_faithful(captured.module, narrowed, derived.variant(()).run, few) else None


def _takes_zeros(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers that holds zeros in a buffer, for token types that are left out.

    A run cannot tell it: with the weights or ids at hand other defaults may happen to give the same.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return False
    holders = [module for module in model.modules() if NAME in module._buffers]
    return bool(holders) and all(
        type(module).__module__.startswith("transformers.models.")
        and NAME in module._non_persistent_buffers_set
        and not module._buffers[NAME].any()
        for module in holders
    )


def _with_zeros(region: Region, place: int) -> fx.Graph:
    """The graph with zeros, as many as there are token ids, for the input at ``place``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(region.graph, copies))
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    types, ids = (inputs[region.inputs[index]] for index in (place, region.call.names.index("input_ids")))
    with graph.inserting_after(list(inputs.values())[-1]):
        zeros = graph.call_function(torch.ops.aten.zeros_like.default, (ids,), {"dtype": types.meta["val"].dtype})
    zeros.meta["val"] = types.meta["val"]
    types.replace_all_uses_with(zeros)
    graph.erase_node(types)
    return graph


def _without(guard: Guard, place: int) -> Guard | None:
    """``guard`` without the argument at ``place``; None where that alone shows a size."""

    def moved(index: int) -> int:
        return index - (index > place)

    tensors = [replace(tensor, index=moved(tensor.index)) for tensor in guard.tensors if tensor.index != place]
    shown = set().union(*(getattr(size, "free_symbols", ()) for tensor in tensors for size in tensor.sizes))
    if not guard.ranges.keys() <= shown:
        return None
    constants = [(moved(index), value) for index, value in guard.constants if index != place]
    free = {
        name: [(moved(index), dimension) for index, dimension in places if index != place]
        for name, places in guard.free.items()
    }
    return Guard(tensors, constants, guard.constraints, guard.ranges, free, set(guard.one_is_safe))
