"""A key-value cache of a fixed capacity that is not written in place, and whose position is a tensor: what a step of
generation is traced with, and replayed with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAME = "StaticKeyValues"
# A cache has room for a multiple of so many tokens.
ROOM = 64


def capacity_for(tokens: int) -> int:
    """How many tokens a cache has room for that is to hold so many."""
    return -(-tokens // ROOM) * ROOM


@cache
def static_key_values() -> type:
    """The class; transformers is imported for it.

    An object of it holds ``position``, a 0-d int64 tensor: how many tokens came before the call, the same for all
    layers; and of each layer keys and values of shape [batch, heads, capacity, head size]. A call puts those of its
    tokens in their places, into new tensors: it may be made again with the same results. The one who generates counts
    the position on.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    class StaticKeyValueLayer(CacheLayerMixin):
        is_sliding = False
        keys: Tensor
        values: Tensor

        def __init__(self, position: Tensor, keys: Tensor, values: Tensor):
            super().__init__()
            self.position, self.keys, self.values, self.is_initialized = position, keys, values, True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """It has its tensors from the beginning."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            places, rows = self.position.reshape(1), key_states.shape[-2]
            if rows != 1:
                places = torch.arange(rows, device=places.device) + places
            self.keys = self.keys.index_copy(2, places, key_states)
            self.values = self.values.index_copy(2, places, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.keys.shape[-2], 0

        def get_seq_length(self) -> Any:
            return self.position

        def get_max_length(self) -> int:
            return self.keys.shape[-2]

    class StaticKeyValues(Cache):
        def __init__(self, tensors: Sequence[Tensor]):
            position, *pairs = tensors
            super().__init__([StaticKeyValueLayer(position, *pair) for pair in zip(pairs[::2], pairs[1::2])])

        def tensors(self) -> list[Tensor]:
            """The position, then keys and values of each layer."""
            layers: list[Any] = self.layers
            return [self.position, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]

        def write(self, tensors: Sequence[Tensor]) -> None:
            """Hold ``tensors``, in the order of ``tensors()``."""
            position, *pairs = tensors
            layers: list[Any] = self.layers
            for layer, keys, values in zip(layers, pairs[::2], pairs[1::2]):
                layer.position, layer.keys, layer.values = position, keys, values

        @property
        def position(self) -> Tensor:
            first: Any = self.layers[0]
            return first.position

    StaticKeyValues.__qualname__ = StaticKeyValues.__name__ = NAME
    return StaticKeyValues


def is_static(value: Any) -> bool:
    """Whether ``value`` is of that class."""
    return type(value).__module__ == __name__ and type(value).__name__ == NAME


def is_static_kind(kind: Any) -> bool:
    """Whether ``kind``, the ``CacheKind`` of a cache, is that of a static one."""
    return bool(getattr(kind, "static", 0))
