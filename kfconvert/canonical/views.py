"""Views that raise for other memory layouts of their argument. They become reshapes, so patterns need only one of both,
and the inputs that they depend on must have the memory layout of the example."""

from __future__ import annotations

from torch import Tensor, fx

from ..graph import aten, mark_laid_out, only_splits
from .contiguous import always_contiguous

_RESHAPES = {aten.view.default: aten.reshape.default, aten.view_as.default: aten.reshape_as.default}


def mark_views(graph: fx.Graph) -> None:
    """Marks the inputs for whose other layouts a view may raise."""
    settled = settled_layouts(graph)
    for node in graph.nodes:
        if node.target in _RESHAPES and node.args[0] not in settled:
            if not only_splits(node.args[0].meta["val"].shape, node.meta["val"].shape):
                for each in unsettled(node, settled):
                    if each.op == "placeholder":
                        mark_laid_out(each)


def views_to_reshapes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.target = _RESHAPES.get(node.target, node.target)


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


def _has_layout(value: object) -> bool:
    return isinstance(value, (Tensor, tuple, list))
