"""The random generators that all code of a process shares, as they were before a model was run for a conversion."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy
import torch


@contextmanager
def same_generators() -> Iterator[None]:
    """After the block, the generators of Python, NumPy and PyTorch have the states that they had before.

    Where the process has had other threads before the block they stay as they are after it: what those have drawn
    meanwhile would come again.
    """
    # The monitor of tqdm, which PyTorch starts as well, runs no code of anybody else's.
    others = [thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]
    alone = others == [threading.current_thread()]
    of_python, of_numpy, of_cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        if alone:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)
            torch.set_rng_state(of_cpu)
            with suppress(RuntimeError):  # after an assertion on a device, which the block has raised by then
                torch.cuda.set_rng_state_all(of_gpus)
