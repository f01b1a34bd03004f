"""Times the fused operators against the plain ATen calls that they stand for, and prints a markdown table.

    PYTHONPATH=. python scripts/bench_ops.py --device cuda --dtype float16

Device time on CUDA is that of 100 calls in one CUDA graph, over four sets of inputs in turn; host time is that of
launching 300 calls. On CPU there is one time. Bytes are those that must move: each input read once, each output written
once. Errors are root-mean-square against float64, relative to the result's root mean square.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.profiling import benchmark_callable

SETS = 4
CALLS_A_GRAPH = 100


class Case(NamedTuple):
    """``aten`` and ``fused`` take what ``inputs()`` makes; ``passes`` counts the moves of a (rows, columns) array."""

    name: str
    shape: tuple[int, int]
    passes: int
    inputs: Callable[[], tuple[Tensor, ...]]
    aten: Callable[..., Tensor]
    fused: Callable[..., Tensor]


def norm_cases(rows: int, columns: int, make: Callable[..., Tensor]) -> Iterator[Case]:
    def inputs() -> tuple[Tensor, ...]:
        return make(rows, columns), make(rows, columns), make(columns), make(columns)

    def case(name: str, passes: int, aten: Callable[..., Tensor], **options) -> Case:
        def fused(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return ops.layer_norm_act(x, (columns,), w, b, residual=r if "add" in name else None, **options)

        return Case(name, (rows, columns), passes, inputs, aten, fused)

    yield case("layer_norm", 2, lambda x, r, w, b: F.layer_norm(x, (columns,), w, b))
    yield case("layer_norm+gelu", 2, lambda x, r, w, b: F.gelu(F.layer_norm(x, (columns,), w, b)), activation="gelu")
    yield case("add+layer_norm", 3, lambda x, r, w, b: F.layer_norm(x + r, (columns,), w, b))

    def rms_case(name: str, passes: int, aten: Callable[..., Tensor]) -> Case:
        def fused(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return ops.rms_norm_act(x, (columns,), w, residual=r if "add" in name else None)

        return Case(name, (rows, columns), passes, inputs, aten, fused)

    yield rms_case("rms_norm", 2, lambda x, r, w, b: F.rms_norm(x, (columns,), w, 1e-6))
    yield rms_case("add+rms_norm", 3, lambda x, r, w, b: F.rms_norm(x + r, (columns,), w, 1e-6))


def elementwise_cases(rows: int, columns: int, make: Callable[..., Tensor]) -> Iterator[Case]:
    def inputs() -> tuple[Tensor, ...]:
        return make(rows, columns), make(columns)

    for name, function in (("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu)):
        yield Case(
            f"bias+{name}",
            (rows, columns),
            2,
            inputs,
            lambda x, b, function=function: function(x + b),
            lambda x, b, name=name: ops.bias_act(x, b, None, name),
        )


def pair_cases(rows: int, columns: int, make: Callable[..., Tensor]) -> Iterator[Case]:
    def inputs() -> tuple[Tensor, ...]:
        return make(rows, columns) / 2, make(rows, columns) / 2  # of more, add_mul_exp is infinite in float16

    for name in ("add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "add_mul_exp", "swish_multiply", "geglu"):
        yield Case(name, (rows, columns), 3, inputs, getattr(reference, name), getattr(ops, name))
    yield Case(
        "add_relu, one row",
        (rows, columns),
        2,
        lambda: (make(rows, columns), make(columns)),
        reference.add_relu,
        ops.add_relu,
    )


def linear_cases(rows: int, columns: int, make: Callable[..., Tensor]) -> Iterator[Case]:
    inner = columns // 4

    def inputs() -> tuple[Tensor, ...]:
        return make(rows, inner), make(columns, inner) / inner**0.5, make(columns)

    for name, function in (("relu", F.relu), ("gelu", F.gelu)):
        yield Case(
            f"linear+{name} from {inner}",
            (rows, columns),
            1,
            inputs,
            lambda x, w, b, function=function: function(F.linear(x, w, b)),
            lambda x, w, b, name=name: ops.linear_act(x, w, b, name),
        )


def device_us(call: Callable[..., Tensor], sets: list[tuple[Tensor, ...]]) -> float:
    """Median microseconds of one call."""
    if not sets[0][0].is_cuda:
        return 1e3 * benchmark_callable(lambda: call(*sets[0]), "cpu", budget_s=0.5).median_ms
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for tensors in sets:
            call(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS_A_GRAPH):
            call(*sets[index % SETS])
    replay_ms = benchmark_callable(graph.replay, "cuda", budget_s=0.3).median_ms
    return 1e3 * replay_ms / CALLS_A_GRAPH


def host_us(call: Callable[..., Tensor], tensors: tuple[Tensor, ...], calls: int = 300) -> float:
    """Median microseconds to launch one call, of five runs."""
    runs = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            call(*tensors)
        runs.append(1e6 * (time.perf_counter() - start) / (calls // 5))
    torch.cuda.synchronize()
    return statistics.median(runs)


def error(call: Callable[..., Tensor], exact: Tensor, tensors: tuple[Tensor, ...]) -> float:
    difference = call(*tensors).double() - exact
    return (difference.square().mean() / exact.square().mean()).sqrt().item()


def row(case: Case) -> str:
    sets = [case.inputs() for _ in range(SETS)]
    exact = case.aten(*(tensor.double() for tensor in sets[0]))
    aten, fused = device_us(case.aten, sets), device_us(case.fused, sets)
    rows, columns = case.shape
    rate = case.passes * rows * columns * sets[0][0].element_size() / fused / 1e6
    host = "" if not exact.is_cuda else f"{host_us(case.aten, sets[0]):.1f} / {host_us(case.fused, sets[0]):.1f}"
    errors = f"{error(case.aten, exact, sets[0]):.1e} / {error(case.fused, exact, sets[0]):.1e}"
    return (
        f"| {case.name} | {rows} x {columns} | {aten:.2f} | {fused:.2f} | {aten / fused:.2f} | {rate:.2f} | {host} "
        f"| {errors} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=arguments.device, dtype=dtype)

    cuda = arguments.device.startswith("cuda")
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{device}, {arguments.dtype}, torch {torch.__version__}, {datetime.date.today()}; `{' '.join(sys.argv)}`\n")
    print("| operator | shape | ATen us | fused us | x | TB/s | host us ATen / fused | error ATen / fused |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with torch.no_grad():
        for rows, columns in ((128, 768), (4096, 768), (16384, 768), (16384, 4096)):
            for case in norm_cases(rows, columns, make):
                print(row(case), flush=True)
        for rows, columns in ((128, 3072), (4096, 3072), (16384, 4096)):
            for case in elementwise_cases(rows, columns, make):
                print(row(case), flush=True)
        for elements in (2**19, 2**20, 5 * 2**20, 50 * 2**20):
            for case in pair_cases(elements // 1024, 1024, make):
                print(row(case), flush=True)
        for rows, columns in ((128, 3072), (4096, 3072)):
            for case in linear_cases(rows, columns, make):
                print(row(case), flush=True)


if __name__ == "__main__":
    main()
