"""Measurements of functions and models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import evaluation, split_inputs
from ..inputs import ExampleCall
from .allocations import allocation
from .bandwidth import bytes_of_call, tensors_in, tensors_of
from .comparison import Comparison
from .device_cost import count_launches
from .measurement import Measurement
from .sampling import sample

QUICK_WARMUP = 3
QUICK_REPEAT = 20


def benchmark_kernel(
    fn: Callable[..., Any],
    inputs: Any = None,
    warmup: int = 10,
    repeat: int = 100,
    bytes_moved: int | None = None,
    *,
    args: Sequence[Any] | None = None,
) -> Measurement:
    """Measures a function that is called in an eager loop without gradients.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs). Alternatively args: a tuple of positional arguments. Every call gets the same objects, including
    values that an earlier call wrote into them.
    warmup: calls before the timed ones, in addition to a first call, which may compile.
    repeat: number of measurements. On CUDA, each is the mean over a batch of calls (about 1 ms, at most 100 calls)
    between two events: the device time of a call, or its launch time on the host if that is longer. The L2 cache is
    not flushed. On other devices, each is the wall-clock time of one call.
    bytes_moved: bytes that a call reads and writes. By default inputs, outputs and module parameters count once
    each.

    Additional calls then determine the number of launches and the peak memory (see `Measurement`).
    Errors of the function propagate. An invalid argument raises ValueError or TypeError with one line.
    """
    check({"fn": fn}, warmup, repeat)
    measurements, _ = measure({"fn": fn}, call_of(inputs, args), warmup, repeat, bytes_moved)
    return measurements["fn"]


def quick_benchmark(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Measurement:
    """Measures `fn(*args, **kwargs)` like `benchmark_kernel`, with 20 measurements after 3 warm-up calls."""
    return benchmark_kernel(fn, (args, kwargs), QUICK_WARMUP, QUICK_REPEAT)


def profile_model_inference(model: nn.Module, inputs: Any, warmup: int = 3, repeat: int = 30) -> Measurement:
    """Measures the forward of a model in eval mode without gradients, like `benchmark_kernel`.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs), on the model's device. Every call gets the same objects, so a cache among them grows.

    The bytes moved count inputs, parameters, buffers and outputs once each. The model moves more, because it also
    writes and reads intermediate results, unless it reads few rows of large embeddings. Training flags and random
    state are restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    with evaluation(model):
        return benchmark_kernel(model, inputs, warmup, repeat)


def call_of(inputs: Any, args: Sequence[Any] | None = None) -> ExampleCall:
    """Converts `inputs` or `args` of `benchmark_kernel` to a call."""
    if args is not None:
        if inputs is not None:
            raise TypeError("pass either inputs or args, not both")
        if not isinstance(args, (tuple, list)):
            raise TypeError(f"args must be a tuple of arguments, not {type(args).__name__}")
        return ExampleCall(tuple(args))
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise TypeError(
            "inputs must be a tensor, a tuple of arguments, a mapping of keyword arguments or "
            f"(args, kwargs), not {type(inputs).__name__}"
        )
    return ExampleCall(*split_inputs(inputs))


@torch.no_grad()
def measure(
    functions: Mapping[str, Callable[..., Any]], call: ExampleCall, warmup: int, repeat: int, bytes_moved: int | None
) -> tuple[dict[str, Measurement], Comparison]:
    """Measures functions of the same inputs in turns. See `benchmark_kernel` for the other arguments."""
    moved, devices = {}, []
    for name, fn in functions.items():
        own_bytes, own_devices = _first_call(fn, call)
        moved[name] = own_bytes if bytes_moved is None else bytes_moved
        devices += own_devices
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    calls = {name: partial(fn, *call.args, **call.kwargs) for name, fn in functions.items()}
    samples = sample(calls, device, warmup, repeat)
    measurements = {}
    for name, call_it in calls.items():
        # The profiler and the allocator counters run last, because they slow calls down.
        allocated = allocation(call_it, device) if device.type == "cuda" else None
        measurements[name] = Measurement.of(
            *samples[name],
            device=str(device),
            bytes_moved=moved[name],
            peak_bytes=None if allocated is None else allocated.peak,
            launches=count_launches(call_it, device),
        )
    return measurements, Comparison({name: times_ms for name, (times_ms, _) in samples.items()})


def _first_call(fn: Callable[..., Any], call: ExampleCall) -> tuple[int, list[torch.device]]:
    """Calls `fn` once and returns the bytes that the call moves and the devices of its tensors."""
    outputs = call(fn)
    tensors = (*call.tensors(), *tensors_of(fn), *tensors_in(outputs))
    return bytes_of_call(fn, call, outputs), [tensor.device for tensor in tensors]


def check(functions: Mapping[str, Any], warmup: int, repeat: int) -> None:
    """Raises a one-line error if an argument of a measurement is invalid."""
    for name, fn in functions.items():
        if not callable(fn):
            raise TypeError(f"{name} must be callable, not {type(fn).__name__}")
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0, got {warmup}")
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1, got {repeat}")
