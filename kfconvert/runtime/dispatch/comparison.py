"""Compares a program with the original forward, see ``Ledger.refresh``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import build
from ..recording.variant import Variant
from .original_forwards import originals

# The largest error that counts as rounding, relative to the largest value of an output.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}
_OF_HALF_TYPES = 5e-2


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
    return not all(map(_is_close, actual, expected))


def _is_close(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return True
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not value.is_floating_point():
        return torch.equal(value, other)
    scale = other.abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if other.numel() else 0.0
    tolerance = _ROUNDING.get(value.dtype, _OF_HALF_TYPES)
    return torch.allclose(value, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
