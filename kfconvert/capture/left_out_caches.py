"""The cache tensors of layers that a trace leaves out (see ``alike_layers``): one argument for all of them.

The exporter makes symbols and guards for each size of each argument: for 28 layers, half of the trace of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..graph import aten, mark_storage, new_storage
from ..inputs import CachePlace, TreeForm
from ..region import Region
from .alike_layers import Stack


def with_one_tensor(leaves: list[Any], form: TreeForm, stacks: Sequence[Stack]) -> list[Any]:
    """Return ``leaves``, flat arguments of ``form``, with the same tensor for all layers that the trace leaves out."""
    found, shared = list(leaves), dict[Any, Tensor]()
    for index, place in _left_out(form, stacks):
        tensor = found[index]
        key = place.of(-1), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        found[index] = shared.setdefault(key, tensor)
    return found


def with_own_tensors(region: Region, stacks: Sequence[Stack]) -> None:
    """Make the graph return the tensor of each layer that the trace left out, and mark that they share no storage."""
    placeholders = {node.name: node for node in region.graph.find_nodes(op="placeholder")}
    own = {
        (place.nested, place.layer, place.name): placeholders[region.inputs[index]]
        for index, place in _left_out(region.call.form, stacks)
    }
    left_out = set(own.values())
    for node in left_out:
        mark_storage(node, new_storage())
    output = region.graph.output_node()
    values: list[Any] = list(output.args[0])
    for index, place in _left_out(region.outputs, stacks):
        value = values[index]
        source = value.args[0] if value.target is aten.clone.default else value  # states are copied for writes
        its = own.get((place.nested, place.layer, place.name))
        if source not in left_out or its is None:
            continue
        if value is source:
            values[index] = its
        else:
            value.replace_input_with(source, its)
    output.args = (tuple(values),)


def _left_out(form: TreeForm, stacks: Sequence[Stack]) -> list[tuple[int, CachePlace]]:
    """The indices and places of tensors in caches of ``form`` for the layers that a trace of ``stacks`` leaves out."""
    placed = [(index, place) for index, place in enumerate(form.places()) if place is not None]
    counts = dict[tuple[int, str], int]()
    for _, place in placed:
        counts[place.cache, place.nested] = place.layer + 1  # in the order of layers
    traced = {stack.count: max(each.traced for each in stacks if each.count == stack.count) for stack in stacks}
    return [
        (index, place)
        for index, place in placed
        if place.layer >= traced.get(counts[place.cache, place.nested], place.layer + 1)
    ]
