"""Schemas of operators, read once per operator: each access to PyTorch's schema makes new objects for its arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class Schema(NamedTuple):
    """What a graph needs of an operator's schema. ``written`` and ``shared`` are positions of arguments: those that it
    writes in place, and those whose storage a result may share."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    written: tuple[int, ...]
    shared: tuple[int, ...]


@functools.cache
def schema_of(target: torch._ops.OpOverload) -> Schema:
    schema = target._schema
    named = [(place, each.alias_info) for place, each in enumerate(schema.arguments) if each.alias_info is not None]
    returns_shared = any(result.alias_info is not None for result in schema.returns)
    return Schema(
        tuple(argument.name for argument in schema.arguments),
        tuple(argument.default_value for argument in schema.arguments),
        tuple(place for place, alias in named if alias.is_write),
        tuple(place for place, _ in named) if returns_shared else (),
    )
