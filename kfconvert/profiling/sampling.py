"""Times of functions in an eager loop, in turns.

On CUDA, a measurement is a batch of calls between two events, from an idle device to the end of the last call. The
time of one call is its device time, or its launch time on the host if that is longer. The L2 cache is not flushed
between calls. On other devices, a measurement is the wall-clock time of one call, with the device synchronized around
it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .comparison import seconds, synchronizer

# Duration and maximum number of calls of a batch: much longer than the resolution of events (0.5 us) and the latency
# of the first launch.
BATCH_MS = 1.0
MAX_CALLS = 100


class Samples(NamedTuple):
    """The time of one call in milliseconds in each round, as the mean over ``calls`` calls."""

    times_ms: list[float]
    calls: int


def sample(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, warmup: int, repeat: int
) -> dict[str, Samples]:
    """Calls each function `warmup` times untimed, then times all of them in `repeat` rounds."""
    samples = {}
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        samples[name] = Samples([], _calls_a_batch(function, device))
    functions_in_order = list(functions.items())
    for index in range(repeat):
        # Every second round runs backwards, so each function follows each neighbor equally often.
        for name, function in functions_in_order if index % 2 == 0 else reversed(functions_in_order):
            times_ms, calls = samples[name]
            times_ms.append(batch_ms(function, calls, device))
    return samples


def batch_ms(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Returns the mean time of `calls` consecutive calls that start on an idle device."""
    batch = partial(_in_a_row, function, calls)
    if device.type != "cuda":
        return 1e3 * seconds(batch, synchronizer(device)) / calls
    stream = torch.cuda.current_stream(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record(stream)
    batch()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / calls


def _calls_a_batch(function: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    once_ms = batch_ms(function, 1, device)
    return max(1, round(BATCH_MS / max(once_ms, BATCH_MS / MAX_CALLS)))


def _in_a_row(function: Callable[[], Any], calls: int) -> Any:
    """The result of the last call, which the caller frees outside the measured time."""
    for _ in range(calls - 1):
        function()
    return function()
