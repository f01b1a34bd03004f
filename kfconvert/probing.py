"""Sizes of 1: the tracer assumes free sizes of at least 2, so a size of 1 is admitted only after a trial run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .guard import Places
from .tracer import Region

# The same operators run on both sides; only their choice of algorithm may differ. A wrong branch differs grossly.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def admit_sizes_of_one(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Let each free size of ``region`` be 1 where ``run``, its graph as traced, then agrees with ``model``.

    ``leaves``: flat user inputs of the region, from which inputs with sizes of 1 are cut.
    """
    free = region.guard.free
    safe = [name for name, places in free.items() if _agrees(model, region, run, _cut(leaves, places))]
    together = _cut(leaves, [place for name in safe for place in free[name]])
    if len(safe) < 2 or _agrees(model, region, run, together):
        for name in safe:
            region.guard.admit_one(name)


def _cut(leaves: list[Any], places: Places) -> list[Any]:
    cut = list(leaves)
    for index, dimension in places:
        cut[index] = cut[index].narrow(dimension, 0, 1)
    return cut


def _agrees(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> bool:
    try:
        expected = pytree.tree_leaves(model(**region.call.keywords(leaves)))
        actual = pytree.tree_leaves(run(leaves))
    except Exception:  # whatever the model or the graph raises for this size, it is not admitted
        return False
    return len(expected) == len(actual) and all(map(_close, expected, actual))


def _close(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return type(expected) is type(actual) and expected == actual
    if expected.shape != actual.shape or expected.dtype is not actual.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, actual)
    scale = expected.double().nan_to_num().abs().max().item() if expected.numel() else 1.0
    return torch.allclose(actual, expected, rtol=0, atol=_TOLERANCE[expected.dtype] * (scale or 1.0), equal_nan=True)
