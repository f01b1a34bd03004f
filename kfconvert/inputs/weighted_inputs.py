"""Several inputs that a model is prepared for, and how often each comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weighted:
    """One of the inputs of ``tune_for``.

    Args:
        inputs: a shape, or example inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        weight: how many of the model's calls are like this, relative to the others; above 0.

    Raises:
        ValueError: the weight is none.
    """

    inputs: Any
    weight: float = 1.0

    def __post_init__(self) -> None:
        if type(self.weight) not in (int, float) or not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be a number above 0, not {self.weight!r}")

    @property
    def as_shape(self) -> tuple[int, ...] | None:
        """The inputs, where they are a shape."""
        if isinstance(self.inputs, (tuple, list)) and self.inputs and all(type(size) is int for size in self.inputs):
            return tuple(self.inputs)
        return None


def weighted(inputs: Any) -> Weighted:
    """``inputs`` with the weight 1, unless they have one."""
    return inputs if isinstance(inputs, Weighted) else Weighted(inputs)
