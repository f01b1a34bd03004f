"""Random generators that a model's author holds: from their state follows what a forward draws."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable
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


# The device of a GPU, None for the host, and the state of the generator that is drawn from there by default.
States = list[tuple[torch.device | None, torch.Tensor]]


def random_states(tensors: Iterable[torch.Tensor]) -> States:
    """Those of the default generators of PyTorch, on the host and on the devices of ``tensors``."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [(None, torch.get_rng_state()), *((device, torch.cuda.get_rng_state(device)) for device in devices)]


def put_states_back(states: States) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
