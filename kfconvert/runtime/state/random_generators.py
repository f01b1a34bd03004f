"""Random generators of a model's author, whose states determine the numbers that a forward draws."""

from __future__ import annotations

import pickle
import random
from typing import Any

import torch
from numpy.random import BitGenerator, Generator, RandomState

GENERATORS = (random.Random, Generator, RandomState, BitGenerator, torch.Generator)


def generator_state(generator: Any) -> Any:
    """The argument for :func:`put_back`; None where a generator has no state, like the operating system's."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (RandomState, torch.Generator)):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def as_bytes(generator: Any) -> bytes:
    """The state of ``generator`` in a comparable form."""
    state = generator_state(generator)
    return pickle.dumps(state.tolist() if isinstance(state, torch.Tensor) else state)


def put_back(generator: Any, state: Any) -> None:
    if state is None:
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (RandomState, torch.Generator)):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state
