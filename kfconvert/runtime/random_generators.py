"""Random generators that a model's author holds: from their state follows what a forward draws."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy
import torch

GENERATORS = (
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
    torch.Generator,
)


def generator_state(generator: Any) -> Any:
    """What :func:`put_back` takes; None where a generator has no state, as that of the operating system."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (numpy.random.RandomState, torch.Generator)):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def as_bytes(generator: Any) -> bytes:
    """The state of ``generator``, to be compared."""
    state = generator_state(generator)
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)


def put_back(generator: Any, state: Any) -> None:
    if state is None:
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (numpy.random.RandomState, torch.Generator)):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state
