"""Calls of attention in a graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph import arguments, schema_of


def change_attention(node: fx.Node, **changed: Any) -> None:
    """Sets arguments of a call of ``scaled_dot_product_attention`` by name. All but three tensors become keywords."""
    given = dict(zip(schema_of(node.target).names, arguments(node))) | changed
    node.args, node.kwargs = tuple(given.pop(name) for name in ("query", "key", "value")), given
