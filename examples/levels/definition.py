"""Lessons: computations with several implementations, and the levels that a device can run."""

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

from kfconvert import extension, kernels

NAMES = ("add_mul_exp", "layer_norm", "linear_gelu", "attention", "transformer_block")
SIZES = ("small", "full")
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Level:
    """An implementation of a lesson.

    build: returns the function of the lesson's inputs, which compiles now or in its first call.
    missing: one line on why the level cannot run here, None if it can.
    """

    name: str
    build: Callable[[], Function]
    missing: str | None = None


@dataclass(frozen=True)
class Lesson:
    """A computation with several implementations.

    formula, learned: the computation, and the conclusion from the levels, as text.
    sizes: keyword arguments of ``inputs`` for "small" and "full".
    inputs: creates the arguments, float32 tensors and integers, from a function that returns standard normal numbers
        of a shape, and from the sizes.
    native: the computation in elementary operations of PyTorch, for TorchScript and torch.compile.
    operators: the computation with fused operators of PyTorch; None if there are none.
    triton: imports Triton kernels and returns the function that runs them.
    kernel: returns the function that runs this package's kernels, from ``kfconvert.kernels.cpu`` or ``.cuda``.
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
        """Returns the levels in order. Levels that ``device`` cannot run have a reason."""
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
    """Returns the lesson ``name``.

    Raises:
        ValueError: there is no such lesson.
    """
    if name not in NAMES:
        raise ValueError(f"no lesson {name!r}: there are {', '.join(NAMES)}")
    return importlib.import_module(f".{name}", __package__).LESSON


def _scripted(function: Function) -> Function:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but still a level here
        return torch.jit.script(function)


def _no_code(device: torch.device) -> str | None:
    """The reason why torch.compile's code cannot be compiled for ``device``, or None."""
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
