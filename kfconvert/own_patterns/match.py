"""What a user's ``when`` is told of a match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph import fixed_size, is_weight


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor that an argument of the reference stands for.

    Attributes:
        shape: its sizes; None for one that is not fixed, such as that of the batch.
        dtype, device: those that it has.
        is_weight: whether it is a parameter or buffer of the model, and not computed in its forward.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    is_weight: bool


@dataclass(frozen=True)
class OwnMatch:
    """A place in a model where a pattern fits: ``match["x"]`` is what its argument x stands for there.

    Attributes:
        name: that of the pattern.
        module: dotted path, within the captured module, of the module whose forward computes the result.
        arguments: by name, a ``MatchedTensor``, or the number for an argument that is a float.
    """

    name: str
    module: str
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def matched(value: Any) -> Any:
    """What ``when`` is told of a captured value."""
    if not isinstance(value, fx.Node):
        return value
    tensor = value.meta["val"]
    shape = tuple(map(fixed_size, tensor.shape))
    return MatchedTensor(shape, tensor.dtype, tensor.device, is_weight(value))
