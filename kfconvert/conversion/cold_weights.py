"""Calls of a site that read its weights from memory, not from the device's cache.

A model whose weights exceed that cache reads all of them from memory in each call. A loop over a single site finds its
weights in the cache. For a few rows, this difference dominates the time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import is_weight
from ..region import LiveTensors, Region
from .samples import Sample

# Consecutive calls use weights of this multiple of the cache size. If that needs more calls than this maximum, the
# weights count as hot.
BEYOND, MOST_CALLS = 1.5, 64
# The minimum free memory, as a multiple of the cache size: each strategy copies the weights.
SPARE = 16


def are_cold(region: Region, live: LiveTensors, device: torch.device) -> bool:
    """Whether the weights of ``region`` are larger than the cache of ``device``."""
    held = (live.tensor(node) for node in region.graph.nodes if is_weight(node))
    return device.type == "cuda" and sum(tensor.nbytes for tensor in held) > _cache_bytes(device)


def calls_beyond_cache(sample: Sample, device: torch.device) -> int:
    """Returns how many calls of the site, each with separate weights, read more than the cache size. Returns 1 if the
    weights are too small to matter, the original calls do not read all of them, or memory is too small."""
    if torch.cuda.mem_get_info(device)[0] < SPARE * _cache_bytes(device):
        return 1
    own = _bytes(_tensors_of(sample))
    calls = int(BEYOND * _cache_bytes(device) / max(own, 1)) + 1
    read = _bytes(sample.arguments[index] for index in _weights_among(sample))
    return calls if 1 < calls <= MOST_CALLS and read >= own else 1


def originals_with_own_weights(sample: Sample, calls: int) -> list[Callable[[], Any]]:
    """Returns ``calls`` calls of the original, each with separate weights."""
    weights = _weights_among(sample)

    def copied() -> list[Any]:
        return [each.clone() if index in weights else each for index, each in enumerate(sample.arguments)]

    return [sample.original, *(partial(sample.subgraph, *copied()) for _ in range(calls - 1))]


def modules_with_own_weights(sample: Sample, calls: int) -> list[nn.Module]:
    """Returns ``calls`` fused modules of the site, each with separate weights; the first uses the site's weights."""
    module = sample.site.replacement.module
    return [module, *(copy.deepcopy(module) for _ in range(calls - 1))]


def _weights_among(sample: Sample) -> set[int]:
    """Returns which arguments of the original calls are weights of the fused module, or views of them."""
    held = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(sample)}
    return {
        index
        for index, each in enumerate(sample.arguments)
        if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in held
    }


def _tensors_of(sample: Sample) -> Iterator[Tensor]:
    module = sample.site.replacement.module
    yield from module.parameters()
    yield from module.buffers()


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cache_bytes(device: torch.device) -> int:
    found: int = torch.cuda.get_device_properties(device).L2_cache_size
    return found
