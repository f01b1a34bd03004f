"""How bench_ops.py times the variants of an operator: in turns, with replays of CUDA graphs or one by one."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfconvert.profiling import Comparison
from kfconvert.profiling.bandwidth import tensors_in
from kfconvert.profiling.sampling import BATCH_MS, batch_ms, sample

# A graph holds so many calls, fewer where they would take longer than GRAPH_MS, but each set of inputs twice.
CALLS_A_GRAPH = 100
GRAPH_MS = 5.0
MIN_ROUNDS = 5
MAX_ROUNDS = 100

Task = Callable[[], Any]


def task(
    call: Callable[..., Any],
    inputs: Sequence[Tensor],
    gradients: Sequence[int],
    grad_outputs: Sequence[Tensor],
    part: str,
) -> Task:
    """What there is to time with one set of inputs: the forward, the backward, or both in a row."""
    if part == "forward":
        return partial(call, *inputs)
    arguments = [x.detach().requires_grad_(index in gradients) for index, x in enumerate(inputs)]
    leaves = [arguments[index] for index in gradients]
    if part == "both":
        return lambda: torch.autograd.grad(tensors_in(call(*arguments)), leaves, grad_outputs)
    outputs = tensors_in(call(*arguments))
    return lambda: torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True)


def device_times(
    variants: Mapping[str, list[Task]], device: torch.device, budget_s: float
) -> tuple[Comparison, set[str]]:
    """Time of a call without that of launching it; and the names of those that no CUDA graph could hold.

    They, and everything on the CPU, are timed one by one.
    """
    if device.type != "cuda":
        return one_by_one(variants, device, budget_s), set()
    functions, calls, uncaptured = {}, {}, set()
    for name, tasks in variants.items():
        try:
            functions[name], calls[name] = captured(tasks, device)
        except RuntimeError:
            torch.cuda.synchronize(device)
            functions[name], calls[name] = in_turn(tasks), 1
            uncaptured.add(name)
    return compared(functions, calls, device, budget_s), uncaptured


def one_by_one(variants: Mapping[str, list[Task]], device: torch.device, budget_s: float) -> Comparison:
    """Time of a call in a loop in eager mode: that of the device, or of launching where that is more."""
    functions = {name: in_turn(tasks) for name, tasks in variants.items()}
    return compared(functions, dict.fromkeys(functions, 1), device, budget_s)


def compared(
    functions: Mapping[str, Task], calls: Mapping[str, int], device: torch.device, budget_s: float
) -> Comparison:
    """Times of one call, where a function makes `calls[name]` of them."""
    least_ms = BATCH_MS if device.type == "cuda" else 0.0
    for function in functions.values():
        function()
    round_ms = sum(max(least_ms, batch_ms(function, 1, device)) for function in functions.values())
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(1e3 * budget_s / round_ms)))
    samples = sample(functions, device, warmup=1, repeat=rounds)
    return Comparison({name: [ms / calls[name] for ms in samples[name].times_ms] for name in functions})


def in_turn(tasks: list[Task]) -> Task:
    turns = itertools.cycle(tasks)
    return lambda: next(turns)()


def captured(tasks: list[Task], device: torch.device) -> tuple[Task, int]:
    """The replay of a CUDA graph of the tasks in turn, and how many calls it makes.

    The current stream must not be the default one. The forwards of backward tasks must have run on it:
    autograd launches a backward on the stream of its forward.
    """
    loop = in_turn(tasks)
    call_ms = batch_ms(loop, 2 * len(tasks), device)
    fitting = int(GRAPH_MS / call_ms) // len(tasks) * len(tasks)
    calls = min(CALLS_A_GRAPH, max(2 * len(tasks), fitting))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        for _ in range(calls):
            loop()
    return graph.replay, calls
