"""One model run in several ways, the candidates: each is prepared and checked, then all are timed in turns.

A turn is some calls in a row, each from an idle device to an idle device, as of somebody who calls one model over and
over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accuracy import Reference, compare, one_line
from ..inputs import ExampleCall
from .allocations import allocation
from .comparison import Comparison, compare_timings, seconds, synchronizer

# What the ways are called that every benchmark of models has: as it is, compiled by PyTorch, and converted.
EAGER, COMPILED, CONVERTED = "eager", "torch.compile", "kfconvert"
# So many rounds at least. A turn has as many calls as leave time for these, in bounds.
ROUNDS = 7
MOST_CALLS_IN_A_ROW = 5
# The first call may compile, the second one records what later ones replay. These are not timed.
CALLS_BEFORE = 2

Prepare = Callable[[], tuple[Callable[[], Any], Any]]


@dataclass
class Candidate:
    """What is known of one way of running a model, besides its times.

    prepare_s: seconds to the first result, compilation or conversion included.
    extra_bytes: by how much the memory that PyTorch has set aside on the device grew until it was ready, after the
    unused part was given back; None off CUDA.
    peak_bytes: the most that a call allocates beyond what was allocated before, see `allocation`.
    error: the largest error of an output against the reference, relative to the scale of that output; None where no
    output is a floating-point one.
    inaccurate: in one line, how its outputs are further from the reference than they may be; None where they are not.
    failure: in one line, why it could not be run; all but `name` is None then.
    details: what its preparation has told.
    """

    name: str
    prepare_s: float | None = None
    extra_bytes: int | None = None
    peak_bytes: int | None = None
    error: float | None = None
    inaccurate: str | None = None
    failure: str | None = None
    details: Any = None


@torch.no_grad()
def compare_candidates(
    candidates: Iterable[tuple[str, Prepare]],
    reference: Reference,
    device: torch.device,
    budget_s: float,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[list[Candidate], Comparison | None]:
    """Prepare the ``candidates``, check what they compute, time them in turns, and measure what they allocate.

    Args:
        candidates: the name of each, and what makes it: it returns what is to be timed, a callable of no arguments, and
            anything that is to be known of it. The first is what the others are compared with. One that fails, or
            computes something else, does not stop the others.
        reference: of ``accuracy.reference_outputs``, for the same inputs.
        budget_s: seconds of timing.
        progress: called with the name of each candidate before it is prepared, and with "time".

    Returns:
        what is known of each candidate, and the times of those that could be run; only what has failed, and None, where
        the first could not.
    """
    found: list[Candidate] = []
    calls: dict[str, Callable[[], Any]] = {}
    once_s = 0.0
    original: Any = None
    synchronize = synchronizer(device)
    for name, prepare in candidates:
        progress(name)
        candidate = Candidate(name)
        try:
            before = _reserved(device)
            start = time.perf_counter()
            call, details = prepare()
            outputs = call()
            synchronize()
            prepare_s = time.perf_counter() - start
            original = outputs if original is None else original
            error, inaccurate = _checked(reference, original, outputs)
            del outputs  # which replayed calls may write anew
            least = min(seconds(call, synchronize) for _ in range(CALLS_BEFORE))
            after = _reserved(device)
            extra = None if before is None or after is None else after - before
            candidate = Candidate(name, prepare_s, extra, None, error, inaccurate, None, details)
            calls[name] = call
            once_s += least
        except Exception as failure:  # a compiler that gives up must not cost the other candidates
            candidate.failure = failure_line(failure)
        found.append(candidate)
        if found[0].failure:
            return found, None
    progress("time")
    in_a_row = max(1, min(MOST_CALLS_IN_A_ROW, int(budget_s / ROUNDS / once_s)))
    turns = {name: partial(_turn, call, in_a_row, synchronize) for name, call in calls.items()}
    timings = compare_timings(turns, device, budget_s, ROUNDS).of_one_call(in_a_row)
    for candidate in found:
        if candidate.name in calls:
            allocated = allocation(calls[candidate.name], device)
            candidate.peak_bytes = None if allocated is None else allocated.peak
    return found, timings


def compiled(model: nn.Module, call: ExampleCall, mode: str | None = None) -> Callable[[], Any]:
    """What calls ``model`` after ``torch.compile``. The mode, where none is named, is the default one, and for inputs
    on CUDA reduce-overhead, which records CUDA graphs as converted models do."""
    on_cuda = any(tensor.is_cuda for tensor in call.tensors())
    return partial(call, torch.compile(model, mode=mode or ("reduce-overhead" if on_cuda else "default")))


def release(device: torch.device) -> None:
    """Forget what was compiled, and free what nobody holds any more."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def failure_line(error: Exception) -> str:
    """The type of an error and the first line of what it says; of a compiler's error, that of what has stopped it."""
    return one_line(getattr(error, "inner_exception", error))[:300]


def _turn(call: Callable[[], Any], count: int, synchronize: Callable[[], None]) -> None:
    for _ in range(count):
        call()
        synchronize()


def _checked(reference: Reference, original: Any, outputs: Any) -> tuple[float | None, str | None]:
    """``error`` and ``inaccurate`` of a ``Candidate``.

    Raises:
        RuntimeError: the outputs are others than the original's.
    """
    result = compare(reference, original, outputs)
    if result.passed is False and result.optimized_error is None:
        raise RuntimeError(f"wrong outputs: {result.reason}")
    error = None if result.optimized_error is None else result.optimized_error.max_rel
    return error, result.reason if result.passed is False else None


def _reserved(device: torch.device) -> int | None:
    """Bytes that are set aside on ``device`` once it is idle; None off CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
