"""The results of the steps of a conversion, from which its statistics are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..accuracy import ValidationResult
from ..inputs import ExampleCall
from ..runtime import Ledger
from .captures import Captures
from .config import ConversionConfig
from .generated_kernels import GeneratedForm
from .timing import Timings


@dataclass(frozen=True)
class Served:
    """``calls``: for each example call of the delivered model, its ``method`` (None for the forward), ``inputs``, and
    the ``hits`` and ``misses`` of programs by path. ``unserved``: by path, why a program serves no example call, even
    if the enclosing programs are off."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    unserved: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished conversion: the model with its programs (in ``ledger``), and the results of the steps."""

    model: nn.Module
    device: torch.device
    call: ExampleCall
    config: ConversionConfig
    captures: Captures
    ledger: Ledger
    seconds: dict[str, float]
    not_written: frozenset[str]
    check_weights: int
    accuracy: ValidationResult | None = None
    timings: Timings | None = None
    reverted: str | None = None
    memory: dict[str, Any] | None = None
    remembered: int = 0
    tuned: Sequence[tuple[ExampleCall, float]] = ()
    time_shares: dict[str, Any] | None = None
    served: Served | None = None
    generated: Sequence[GeneratedForm] = ()
