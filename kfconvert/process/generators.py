"""Restores the global random generators after runs of a model for a conversion."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy
import torch


@contextmanager
def same_generators() -> Iterator[None]:
    """Context manager that restores the states of the generators of Python, NumPy and PyTorch.

    Numbers that other threads draw meanwhile may repeat.
    """
    of_python, of_numpy, of_cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_cpu)
        with suppress(RuntimeError):  # after a device-side assertion, which was already raised
            torch.cuda.set_rng_state_all(of_gpus)
