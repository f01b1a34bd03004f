"""The description of a match that a user's ``when`` receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph import fixed_size, is_weight


@dataclass(frozen=True)
class MatchedTensor:
    """The tensor in a model that matches an argument of the reference.

    Attributes:
        shape: its sizes, with None for sizes that are not fixed, such as the batch size.
        dtype, device: its dtype and device.
        is_weight: whether it is a parameter or buffer of the model, and not computed in its forward.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    is_weight: bool


@dataclass(frozen=True)
class OwnMatch:
    """A place in a model where a pattern matches: ``match["x"]`` is the value of the argument x.

    Attributes:
        name: name of the pattern.
        module: dotted path, within the captured module, of the module whose forward computes the result.
        arguments: by name, a ``MatchedTensor``, or the number for a float argument.
    """

    name: str
    module: str
    arguments: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def matched(value: Any) -> Any:
    """Returns the description of a captured value for ``when``."""
    if not isinstance(value, fx.Node):
        return value
    tensor = value.meta["val"]
    shape = tuple(map(fixed_size, tensor.shape))
    return MatchedTensor(shape, tensor.dtype, tensor.device, is_weight(value))
