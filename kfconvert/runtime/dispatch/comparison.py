"""Compares a program with the original forward, see ``Ledger.refresh``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ...accuracy import is_close
from ...inputs import build
from ..recording.variant import Variant
from .original_forwards import originals

# The largest error that counts as rounding, relative to the largest value of an output.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def differs(variant: Variant, model: nn.Module) -> bool:
    """Whether the program of ``variant`` and the original forward of ``model`` compute different outputs for random
    inputs of the example's shapes; False where it draws random numbers, writes to its inputs or takes a cache."""
    region = variant.region
    if region.example is None or region.is_random or region.has_effects or region.has_caches or region.communicates:
        return False
    device = next((tensor.device for tensor in region.guard.tensors), torch.device("cpu"))
    given: list[Any] = [region.call.leaves((), build(region.example, device)) for _ in range(2)]
    if variant.refusal(given[0]) is not None:
        return False
    with torch.no_grad():
        try:
            with originals():
                expected, _ = region.flat_outputs(model, given[0])
        except Exception:  # the model's code may reject random inputs
            return False
        actual = variant.program.run(given[1])
    return not all(map(partial(is_close, tolerances=_TOLERANCES), expected, actual))
