"""Replaces the spellings of matrix products with ``aten.matmul``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..graph import Aliases, aten, fixed_size


def spell_products(graph: fx.Graph) -> None:
    """Replaces ``bmm`` with ``matmul``, and an ``einsum`` with one summed index with a permuted ``matmul``."""
    for node in list(graph.nodes):
        if node.target is aten.bmm.default:
            node.target = aten.matmul.default
        elif node.target is aten.einsum.default and len(node.args[1]) == 2:
            _einsum_to_matmul(graph, node)


def _einsum_to_matmul(graph: fx.Graph, node: fx.Node) -> None:
    inputs, arrow, out = node.args[0].replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    roles = _roles(left, right, out) if arrow else None
    if roles is None:
        return
    batch, row, summed, column = roles
    sizes = [operand.meta["val"].shape[labels.index(summed)] for operand, labels in zip(node.args[1], (left, right))]
    if [fixed_size(size) == 1 for size in sizes] in ([True, False], [False, True]):
        return  # einsum expands a summed dimension of size 1, matmul does not
    with graph.inserting_before(node):
        operands = [
            _permuted(graph, operand, labels, wanted)
            for operand, labels, wanted in zip(
                node.args[1], (left, right), (batch + row + summed, batch + summed + column)
            )
        ]
        product = graph.call_function(aten.matmul.default, tuple(operands))
        order = batch + row + column
        product.meta = {**node.meta, "val": node.meta["val"].permute([out.index(label) for label in order])}
        result = _permuted(graph, product, order, out)
    node.replace_all_uses_with(result)


def _roles(left: str, right: str, out: str) -> tuple[str, str, str, str] | None:
    """The (batch, row, summed, column) labels of a batched matrix product; None for any other equation."""
    if any(len(set(labels)) != len(labels) or not labels.isalpha() for labels in (left, right, out)):
        return None
    batch = "".join(label for label in out if label in left and label in right)
    row, column = ("".join((set(labels) - set(batch)) & set(out)) for labels in (left, right))
    summed = "".join((set(left) & set(right)) - set(out))
    if len(row) != 1 or len(column) != 1 or len(summed) != 1:
        return None
    known = set(left) == set(batch + row + summed) and set(right) == set(batch + summed + column)
    return (batch, row, summed, column) if known and set(out) == set(batch + row + column) else None


def _permuted(graph: fx.Graph, value: fx.Node, labels: str, wanted: str) -> fx.Node:
    if labels == wanted:
        return value
    order = [labels.index(label) for label in wanted]
    swapped = wanted == labels[:-2] + labels[:-3:-1]
    target, how = (aten.transpose.int, (-2, -1)) if swapped else (aten.permute.default, (order,))
    permuted = graph.call_function(target, (value, *how))
    permuted.meta = {**value.meta, "val": value.meta["val"].permute(order)}
    return permuted


# The calls between scores and their softmax.
_OF_SCORES = {
    aten.add.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.reshape.default, aten.to.dtype,
    aten.where.self,
}  # fmt: skip


def scale_queries(graph: fx.Graph) -> None:
    """Replaces ``matmul(q, k) * s`` with ``matmul(q * s, k)``, where s has one element for each matrix and a softmax
    takes the scores, as in the cosine attention of Swin V2 (Liu et al., arXiv:2111.09883)."""
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor or not _is_for_softmax(node):
            continue
        for product, factor in (node.args, node.args[::-1]):
            if _scales_scores(factor, product) and not any(map(aliases.is_written, (*product.args, product, factor))):
                with graph.inserting_before(node):
                    query = graph.call_function(aten.mul.Tensor, (product.args[0], factor))
                    scores = graph.call_function(aten.matmul.default, (query, product.args[1]))
                query.meta, scores.meta = dict(product.args[0].meta), dict(node.meta)
                node.replace_all_uses_with(scores)
                break


def _is_for_softmax(node: fx.Node) -> bool:
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is aten.softmax.int:
            return True
        if node.target not in _OF_SCORES:
            break
    return False


def _scales_scores(factor: Any, product: Any) -> bool:
    """Whether ``product`` is one of queries and keys, and ``factor`` has one element for each matrix of it."""
    if getattr(product, "target", None) is not aten.matmul.default or len(product.users) > 1:
        return False
    scale, scores, query = (getattr(node, "meta", {}).get("val") for node in (factor, product, product.args[0]))
    if not isinstance(scale, Tensor) or scale.dtype is not scores.dtype or scale.dim() > scores.dim():
        return False
    *own, rows, columns = map(str, (1, 1, *scale.shape))
    batch = list(map(str, scores.shape[:-2]))
    fits = all(size in ("1", other) for size, other in zip(own[::-1], (*batch[::-1], "1", "1")))
    return fits and rows == columns == "1" and batch == list(map(str, query.shape[:-2]))
