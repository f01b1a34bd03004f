"""A key-value cache for tracing and replaying generation steps: fixed capacity, no in-place writes of keys and values,
and a tensor as position."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NAME = "StaticKeyValues"
# The capacity of a cache is a multiple of this number of tokens.
ROOM = 64
# The attributes of a layer with one entry for each position, in dimension 2 of 4.
SEQUENCES = ("keys", "values")
# The attributes of a layer with tensors of fixed size by index, which a forward writes in place.
STATES = ("conv_states", "recurrent_states")


def capacity_for(tokens: int) -> int:
    """Returns the capacity in tokens of a cache for ``tokens`` tokens."""
    return -(-tokens // ROOM) * ROOM


@cache
def static_classes() -> dict[str, type]:
    """Returns the classes of static caches and of their layers by name, and imports transformers for them.

    A cache has ``position``, a 0-d int64 tensor with the number of tokens before the call, shared by all layers; keys
    and values of each attention layer, of shape [batch, heads, capacity, head size]; and the states of each recurrent
    layer, as in transformers' cache. A call writes keys and values of its tokens into new tensors, so it can be
    repeated with equal results. The caller of the model advances the position.
    """
    from transformers import cache_utils

    class StaticKeyValueLayer(cache_utils.CacheLayerMixin):
        is_sliding = False
        keys: Tensor
        values: Tensor
        position: Tensor

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
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

    class StaticKeyValues(cache_utils.Cache):
        position: Tensor

    classes: list[type] = [StaticKeyValues, StaticKeyValueLayer]
    recurrent = getattr(cache_utils, "LinearAttentionLayer", None)
    if recurrent is not None:
        classes.append(type("StaticHybridLayer", (recurrent, StaticKeyValueLayer), {"is_compileable": False}))
    for each in classes:
        each.__module__, each.__qualname__ = __name__, each.__name__
    return {each.__name__: each for each in classes}


def as_static(filled: Any, position: Tensor, spare: int) -> Any:
    """Returns the static cache with the contents of ``filled``, a cache of transformers, and room for ``spare`` more
    tokens. ``position``: the number of its tokens."""
    classes = static_classes()
    made: Any = object.__new__(classes[NAME])
    made.__init__(layers=[_static_layer(layer, position, spare) for layer in filled.layers])
    made.position = position
    return made


def _static_layer(layer: Any, position: Tensor, spare: int) -> Any:
    states = {name: dict(value) for name, value in vars(layer).items() if type(value) is dict}
    if not hasattr(layer, "keys"):
        other = copy.copy(layer)
        other.__dict__.update(states)
        return other
    made: Any = object.__new__(static_classes()["StaticHybridLayer" if states else "StaticKeyValueLayer"])
    if states:
        made.__dict__.update(vars(layer))
    # A window has dropped the first tokens.
    dropped = layer.get_seq_length() - layer.keys.shape[2]
    padded = {name: nn.functional.pad(vars(layer)[name], (0, 0, dropped, spare)) for name in SEQUENCES}
    made.__dict__.update({**states, **padded, "is_initialized": True, "position": position})
    return made


def tensors_of(layer: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yields the name of each tensor of a layer of a cache, with its index where the layer has several, and the
    tensor."""
    own = vars(layer)
    for name in SEQUENCES:
        if own.get(name) is not None:
            yield (name,), own[name]
    for name in STATES:
        for index, state in own.get(name, {}).items():
            if state is not None:
                yield (name, index), state


def set_tensor(layer: Any, name: tuple[Any, ...], tensor: Tensor) -> None:
    """Sets the tensor of a layer with a ``name`` of ``tensors_of``."""
    if len(name) == 1:
        setattr(layer, name[0], tensor)
    else:
        getattr(layer, name[0])[name[1]] = tensor


def is_static(value: Any) -> bool:
    return type(value).__module__ == __name__ and type(value).__name__ == NAME


def is_static_kind(kind: Any) -> bool:
    """Whether ``kind`` is the ``CacheKind`` of a static cache."""
    cls = getattr(kind, "cls", None)
    return cls is not None and (cls.__module__, cls.__name__) == (__name__, NAME)
