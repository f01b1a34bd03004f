"""Parts of test cases: modules, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]
Inputs = Callable[[], tuple[Tensor, ...]]


def net(forward: Callable[..., Any], **layers: Callable[[], Any]) -> Make:
    """Returns a function that creates a module with this ``forward``. ``layers`` create its modules, parameters and
    buffers."""

    def made() -> nn.Module:
        module = type("Net", (nn.Module,), {"forward": forward})()
        for name, make in layers.items():
            setattr(module, name, make())
        return module

    return made


def chain(*makes: Make) -> Make:
    """Returns a function that creates an nn.Sequential."""
    return lambda: nn.Sequential(*(make() for make in makes))


def linear(features: int = 16, out: int = 16, bias: bool = True) -> Make:
    return lambda: nn.Linear(features, out, bias)


def conv(**options: Any) -> Make:
    """A 3x3 convolution of 8 channels."""
    return lambda: nn.Conv2d(**{"in_channels": 8, "out_channels": 8, "kernel_size": 3, **options})


def batch_norm(**options: Any) -> Make:
    return lambda: nn.BatchNorm2d(8, **options)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.rand(shape) + 0.5)


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Inputs:
    return lambda: tuple(torch.randn(shape).to(dtype) for shape in shapes)


TOKENS, IMAGES = random((2, 5, 16)), random((2, 8, 9, 9))
