"""What a lesson is: a computation that is written in several ways, and which of them a device can run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import extension, kernels
from . import NAMES

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Level:
    """One way to compute a lesson's result.

    build: gives the function, which takes the lesson's inputs; what it compiles, it compiles then or at its first call.
    missing: in one line why it cannot run here, None where it can.
    """

    name: str
    build: Callable[[], Function]
    missing: str | None = None


@dataclass(frozen=True)
class Lesson:
    """One computation.

    formula, learned: what is computed, and what the levels show, in words.
    sizes: for "small" and "full" what ``inputs`` takes, by name.
    inputs: makes the arguments, float32 tensors and integers, from a function that gives standard normal numbers of a
        shape, and the sizes.
    native: the computation in elementary operations of PyTorch, which TorchScript and torch.compile can read.
    operators: the same with the operators that PyTorch has for several of them; None where it has none.
    triton: gives the function that runs Triton kernels, which are imported by that.
    kernel: gives the function that runs this package's kernels, from ``kfconvert.kernels.cpu`` or ``.cuda``.
    """

    name: str
    formula: str
    learned: str
    sizes: Mapping[str, Mapping[str, int]]
    inputs: Callable[..., tuple[Any, ...]]
    native: Function
    operators: Function | None
    triton: Callable[[], Function]
    kernel: Callable[[Any], Function]

    def levels(self, device: torch.device) -> list[Level]:
        """The levels in their order, those that ``device`` cannot run with the reason."""
        levels = [Level("PyTorch native", lambda: self.native)]
        if self.operators is not None:
            operators = self.operators
            levels.append(Level("PyTorch operators", lambda: operators))
        levels += [
            Level("TorchScript", lambda: _scripted(self.native)),
            Level("torch.compile", lambda: torch.compile(self.native, dynamic=False, fullgraph=True), _no_code(device)),
            Level("Triton", self.triton, _no_triton(device)),
            Level("CUDA", lambda: self.kernel(kernels.cuda), _no_cuda_kernels(device)),
        ]
        if device.type == "cpu":
            levels.append(Level("C++", lambda: self.kernel(kernels.cpu), extension.load_errors.get("cpu")))
        return levels


def lesson(name: str) -> Lesson:
    """The lesson of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"no lesson {name!r}: there are {', '.join(NAMES)}")
    return importlib.import_module(f".{name}", __package__).LESSON


def _scripted(function: Function) -> Function:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated is for those to know who begin something new with it
        return torch.jit.script(function)


def _no_code(device: torch.device) -> str | None:
    """Why what torch.compile writes could not be compiled for ``device``."""
    if device.type == "cuda":
        return None if _has_triton() else "torch.compile needs the package triton on a CUDA device"
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return None if any(map(shutil.which, compilers)) else "torch.compile needs a C++ compiler on the CPU"


def _no_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Triton needs a CUDA device"
    return None if _has_triton() else "the package triton is not installed"


def _no_cuda_kernels(device: torch.device) -> str | None:
    return extension.load_errors.get("cuda") if device.type == "cuda" else "CUDA kernels need a CUDA device"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
