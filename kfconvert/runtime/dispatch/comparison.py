"""Compares a program with the original forward, see ``Ledger.refresh``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...accuracy import are_close
from ...inputs import build
from ..recording.program_errors import Fallback
from ..recording.variant import Variant
from .original_forwards import originals

# The largest error that counts as rounding, relative to the largest value of an output.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def difference(variant: Variant, model: nn.Module) -> str | None:
    """The difference between the program of ``variant`` and the original forward of ``model``, for random inputs of
    the example's shapes: other outputs, or an error of the program only. None where there is none, and where it draws
    random numbers, writes to its inputs or takes a cache."""
    region = variant.region
    if region.example is None or region.is_random or region.has_effects or region.has_caches or region.communicates:
        return None
    device = next((tensor.device for tensor in region.guard.tensors), torch.device("cpu"))
    given: list[Any] = [region.call.leaves((), build(region.example, device)) for _ in range(2)]
    try:
        if variant.refusal(given[0]) is not None:
            return None
        with originals():
            expected, _ = region.flat_outputs(model, given[0])
    except Exception:  # calls do not run the program, or the model's code rejects random inputs
        return None
    try:
        actual = variant.program.run(given[1])
    except Fallback:  # calls run the original forward, for this reason
        return None
    except Exception as error:
        return f"an error of the program: {type(error).__name__}"
    return None if are_close(expected, actual, _TOLERANCES) else "outputs that differ from the original's"
