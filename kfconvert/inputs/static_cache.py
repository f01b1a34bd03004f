"""A key-value cache for tracing and replaying generation steps: fixed capacity, no in-place writes, and a tensor as
position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAME = "StaticKeyValues"
# The capacity of a cache is a multiple of this number of tokens.
ROOM = 64


def capacity_for(tokens: int) -> int:
    """Returns the capacity in tokens of a cache for ``tokens`` tokens."""
    return -(-tokens // ROOM) * ROOM


@cache
def static_key_values() -> type:
    """Returns the class of static caches, and imports transformers for it.

    An instance has ``position``, a 0-d int64 tensor with the number of tokens before the call, shared by all layers;
    and keys and values of each layer, of shape [batch, heads, capacity, head size]. A call writes keys and values of
    its tokens into new tensors, so it can be repeated with equal results. The caller of the model advances the
    position.
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
            """Does nothing, because the tensors exist from the start."""

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
            """Returns the position, then keys and values of each layer."""
            layers: list[Any] = self.layers
            return [self.position, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]

        def write(self, tensors: Sequence[Tensor]) -> None:
            """Sets the tensors, in the order of ``tensors()``."""
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
    return type(value).__module__ == __name__ and type(value).__name__ == NAME


def is_static_kind(kind: Any) -> bool:
    """Whether ``kind`` is the ``CacheKind`` of a static cache."""
    return bool(getattr(kind, "static", 0))
