"""Compares several ways of running a model (candidates): prepares and checks each, then times all in turns.

A turn is a number of consecutive calls of one candidate, each from an idle device to an idle device.
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

# Candidate names of model benchmarks: the original, torch.compile, and the converted model.
EAGER, COMPILED, CONVERTED = "eager", "torch.compile", "kfconvert"
# Minimum number of rounds, and bounds of the calls per turn, which is chosen to allow this number of rounds.
ROUNDS = 7
MOST_CALLS_IN_A_ROW = 5
# Untimed calls: the first may compile, and the second may record a CUDA graph.
CALLS_BEFORE = 2

Prepare = Callable[[], tuple[Callable[[], Any], Any]]


@dataclass
class Candidate:
    """Results of one way of running a model, without its times.

    prepare_s: seconds to the first result, including compilation or conversion.
    extra_bytes: growth of PyTorch's reserved device memory until the candidate was ready, after freeing the unused
    part; None on other devices than CUDA.
    peak_bytes: peak memory of a call beyond the memory before it, see `allocation`.
    error: the largest error of an output against the reference, relative to the scale of that output; None without
    floating-point outputs.
    inaccurate: one line on outputs whose error exceeds the limit; None if there are none.
    failure: one line on why the candidate could not run; all other fields except `name` are then None.
    details: the details from `Prepare`.
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
    """Prepares the ``candidates``, checks their outputs, times them in turns, and measures their allocations.

    Args:
        candidates: pairs of a name and a function that prepares the candidate. The function returns the callable
            without arguments to time, and details. The first candidate is the baseline. A candidate that fails or has
            wrong outputs does not stop the others.
        reference: result of ``accuracy.reference_outputs`` for the same inputs.
        budget_s: seconds of timing.
        progress: called with the name of each candidate before its preparation, and with "time".

    Returns:
        the results of each candidate, and the times of those that ran; only failures and None if the first failed.
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
            del outputs  # replayed calls may overwrite them
            least = min(seconds(call, synchronize) for _ in range(CALLS_BEFORE))
            after = _reserved(device)
            extra = None if before is None or after is None else after - before
            candidate = Candidate(name, prepare_s, extra, None, error, inaccurate, None, details)
            calls[name] = call
            once_s += least
        except Exception as failure:  # a failed candidate must not stop the others
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
    """Returns a function that calls ``model`` after ``torch.compile``. If ``mode`` is None, the mode is reduce-overhead
    (with CUDA graphs, as in converted models) for inputs on CUDA, else the default mode."""
    on_cuda = any(tensor.is_cuda for tensor in call.tensors())
    return partial(call, torch.compile(model, mode=mode or ("reduce-overhead" if on_cuda else "default")))


def release(device: torch.device) -> None:
    """Resets torch.compile and frees unused memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def failure_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message; for compiler errors, of the cause."""
    return one_line(getattr(error, "inner_exception", error))[:300]


def _turn(call: Callable[[], Any], count: int, synchronize: Callable[[], None]) -> None:
    for _ in range(count):
        call()
        synchronize()


def _checked(reference: Reference, original: Any, outputs: Any) -> tuple[float | None, str | None]:
    """Returns ``error`` and ``inaccurate`` of a ``Candidate``.

    Raises:
        RuntimeError: the outputs differ from the original's.
    """
    result = compare(reference, original, outputs)
    if result.passed is False and result.optimized_error is None:
        raise RuntimeError(f"wrong outputs: {result.reason}")
    error = None if result.optimized_error is None else result.optimized_error.max_rel
    return error, result.reason if result.passed is False else None


def _reserved(device: torch.device) -> int | None:
    """Waits for ``device`` and returns its reserved bytes; None on other devices than CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
