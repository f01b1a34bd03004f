"""What the benchmarks of one function share: their options, the sizes, and the table of what was measured.

A benchmark gives two functions. ``inputs(elements, device)`` makes the arguments of a call on so many elements;
``implementations(device)`` names the functions that compute the same of them, of which the others are compared with the
first. They take turns; times, bandwidth and its share of a copy's, and on CUDA launches and memory, are those of
``kfconvert.profiling.KernelProfiler``.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kfconvert import extension, kernels
from kfconvert.profiling import KernelProfiler

ELEMENTS = (100_000, 500_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000)


def main(
    description: str | None,
    inputs: Callable[[int, torch.device], tuple[Any, ...]],
    implementations: Callable[[torch.device], Mapping[str, Callable[..., Any]]],
    argv: Sequence[str] | None = None,
) -> None:
    """Measure the implementations at each size; one that fails is told and left out."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--small", action="store_true", help="the smallest size only, some seconds on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", metavar="FILE", help="write a chart of the times there, a PNG; needs matplotlib")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    profiler = KernelProfiler()
    for elements in ELEMENTS[:1] if options.small else ELEMENTS:
        torch.manual_seed(0)
        args = inputs(elements, device)
        functions = {name: fn for name, fn in implementations(device).items() if _works(name, fn, args)}
        repeat = 10 if options.small else 50
        label = f"{elements:,} elements"
        profiler.compare_implementations(functions, args=args, warmup=3, repeat=repeat, label=label)
    print(profiler.summary())
    if options.plot:
        profiler.plot_comparison(path=options.plot)


def of_every_family(name: str, device: torch.device) -> dict[str, Callable[..., Any]]:
    """The operator ``name`` as its definition in plain PyTorch, what torch.compile makes of that, and all kernels of it
    that run on ``device``."""
    plain = getattr(kernels.reference, name)
    found = {"plain PyTorch": plain, "torch.compile": torch.compile(plain, dynamic=False)}
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is not None and name in kernels.triton.__all__:
            found["Triton"] = getattr(kernels.triton, name)
        if extension.CUDA_KERNELS_LOADED:
            found["CUDA"] = getattr(kernels.cuda, name)
    elif extension.EXTENSION_LOADED:
        found["C++"] = getattr(kernels.cpu, name)
    return found


def _works(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a call, which may have something to compile, comes to its end."""
    try:
        with torch.no_grad():
            function(*args)
    except Exception as error:  # a compiler may be missing, memory may not suffice
        print(f"{name}: failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return False
    return True
