"""Times of functions as a loop in eager mode sees them, the functions taking turns.

On CUDA a measurement spans a batch of calls between two events: it begins on an idle device and ends when the
device has done the last call, so that the time of one call is what the device needs for it, or what the host
needs to launch it where that is more. The L2 cache is not flushed between calls. Elsewhere a measurement is
the wall-clock time of one call, the device synchronised around it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .comparison import seconds, synchronizer

# A batch takes about so long, unless that were more calls than these: long against the resolution of events
# (half a microsecond) and against the latency of the first launch.
BATCH_MS = 1.0
MAX_CALLS = 100


class Samples(NamedTuple):
    """The time of one call in milliseconds in each round, the mean over so many calls."""

    times_ms: list[float]
    calls: int


def sample(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, warmup: int, repeat: int
) -> dict[str, Samples]:
    """Call each function `warmup` times untimed, then time all of them in `repeat` rounds."""
    samples = {}
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        samples[name] = Samples([], _calls_a_batch(function, device))
    functions_in_order = list(functions.items())
    for index in range(repeat):
        # every second round runs backwards: each function follows each neighbour equally often
        for name, function in functions_in_order if index % 2 == 0 else reversed(functions_in_order):
            times_ms, calls = samples[name]
            times_ms.append(batch_ms(function, calls, device))
    return samples


def batch_ms(function: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Mean time of one of so many calls in a row, which begin on an idle device."""
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
    """Result of the last call: whoever asked for it frees it outside the measured time."""
    for _ in range(calls - 1):
        function()
    return function()
