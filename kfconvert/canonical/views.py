"""Views that raise for other memory layouts of their argument. They become reshapes, so patterns need only one of both.
Marks on the nodes let a program raise if the original does."""

from __future__ import annotations

from torch import Tensor, fx

from ..graph import aten, mark_laid_out, mark_view, only_splits
from .contiguous import always_contiguous


def mark_views(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Marks the views of ``graph`` that may raise for inputs with another layout than in the trace. Returns these,
    each with the inputs that it depends on."""
    settled = settled_layouts(graph)
    found = []
    for node in graph.nodes:
        if node.target in (aten.view.default, aten.view_as.default) and node.args[0] not in settled:
            if not only_splits(node.args[0].meta["val"].shape, node.meta["val"].shape):
                mark_view(node)
                found.append((node, [each for each in unsettled(node, settled) if each.op == "placeholder"]))
    return found


def settled_layouts(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose memory layout does not depend on the inputs: weights, contiguous values, and values
    computed from these."""
    found = always_contiguous(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        is_contiguous = node.target is aten.contiguous.default and not node.kwargs
        if is_contiguous or not _has_layout(node.meta.get("val")) or found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def unsettled(node: fx.Node, settled: set[fx.Node]) -> list[fx.Node]:
    """Returns ``node`` and the nodes whose layout determines its layout."""
    found, pending = dict.fromkeys((node,)), [node]
    while pending:
        for value in pending.pop().all_input_nodes:
            if value not in settled and value not in found:
                found[value] = None
                pending.append(value)
    return list(found)


def mark_lost(graph: fx.Graph, marked: list[tuple[fx.Node, list[fx.Node]]]) -> None:
    """Marks the inputs of ``graph`` that must have the traced layout, because a ``marked`` view of them was
    replaced by another call."""
    nodes = set(graph.nodes)
    for view, inputs in marked:
        if view not in nodes:
            for node in inputs:
                mark_laid_out(node)


def _has_layout(value: object) -> bool:
    return isinstance(value, (Tensor, tuple, list))
