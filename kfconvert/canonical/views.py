"""Views that fail where their argument lies otherwise in memory, as an argument of a call may. They become reshapes, so
that patterns need to know one of the two only; what is noted of them lets a program fail where the original does."""

from __future__ import annotations

from torch import Tensor, fx

from ..graph import aten, mark_laid_out, mark_view, only_splits
from .contiguous import always_contiguous


def mark_views(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Note with the views of ``graph`` which of them may fail, for inputs that lie otherwise than those of the trace;
    these are returned, each with the inputs that it depends on."""
    settled = settled_layouts(graph)
    found = []
    for node in graph.nodes:
        if node.target in (aten.view.default, aten.view_as.default) and node.args[0] not in settled:
            if not only_splits(node.args[0].meta["val"].shape, node.meta["val"].shape):
                mark_view(node)
                found.append((node, [each for each in unsettled(node, settled) if each.op == "placeholder"]))
    return found


def settled_layouts(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that lie in memory as they do whatever inputs the graph is given: its weights, what is contiguous, and
    what is computed from such nodes."""
    found = always_contiguous(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        is_contiguous = node.target is aten.contiguous.default and not node.kwargs
        if is_contiguous or not _has_layout(node.meta.get("val")) or found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def unsettled(node: fx.Node, settled: set[fx.Node]) -> list[fx.Node]:
    """``node`` and the nodes on whose layout its own depends."""
    found, pending = dict.fromkeys((node,)), [node]
    while pending:
        for value in pending.pop().all_input_nodes:
            if value not in settled and value not in found:
                found[value] = None
                pending.append(value)
    return list(found)


def mark_lost(graph: fx.Graph, marked: list[tuple[fx.Node, list[fx.Node]]]) -> None:
    """Note with the inputs of ``graph`` that they have to lie as in the trace where one of the ``marked`` views that
    depends on them is not there any more, as another call stands for it."""
    nodes = set(graph.nodes)
    for view, inputs in marked:
        if view not in nodes:
            for node in inputs:
                mark_laid_out(node)


def _has_layout(value: object) -> bool:
    return isinstance(value, (Tensor, tuple, list))
