"""Replaces reads of the inner tensors of weights, such as quantized ones, by placeholders."""

from __future__ import annotations

import torch
from torch import fx

from ..region import Region
from ..wrapped_tensors import Path

_READ = torch.ops.export.access_subclass_inner_tensor.default


def take_inner_tensors(region: Region) -> None:
    """Adds a placeholder for each inner tensor of a weight that the graph reads (see ``Region.inner``).

    The exporter adds a call for each read, which would run in Python in each call of the model.
    """
    graph, found = region.graph, dict[tuple[tuple[str, str], Path], fx.Node]()
    read = set[fx.Node]()
    for node in graph.find_nodes(op="call_function", target=_READ):
        outer, attribute = node.args
        if outer.name not in region.slots:
            continue
        place = region.slots[outer.name], (*region.inner.get(outer.name, ()), attribute)
        if place not in found:
            with graph.inserting_after(outer):
                made = graph.placeholder(f"{outer.name}_{attribute}")
            made.meta = {name: value for name, value in node.meta.items() if name != "nn_module_stack"}
            found[place] = made
            region.slots[made.name], region.inner[made.name] = place
        node.replace_all_uses_with(found[place])
        graph.erase_node(node)
        read.add(outer)
    for outer in read:
        if not outer.users:
            graph.erase_node(outer)
            region.slots.pop(outer.name)
            region.inner.pop(outer.name, None)
    graph.lint()
