"""Inputs to tune a model for, with weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weighted:
    """An item of ``tune_for``: inputs with a weight.

    Args:
        inputs: a shape, or example inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        weight: relative frequency of such calls; above 0.

    Raises:
        ValueError: the weight is not a number above 0.
    """

    inputs: Any
    weight: float = 1.0

    def __post_init__(self) -> None:
        if type(self.weight) not in (int, float) or not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be a number above 0, not {self.weight!r}")

    @property
    def as_shape(self) -> tuple[int, ...] | None:
        """Returns the inputs if they are a shape, else None."""
        if isinstance(self.inputs, (tuple, list)) and self.inputs and all(type(size) is int for size in self.inputs):
            return tuple(self.inputs)
        return None


def weighted(inputs: Any) -> Weighted:
    """Returns ``inputs`` with their weight, or with weight 1."""
    return inputs if isinstance(inputs, Weighted) else Weighted(inputs)
