"""Calls of a site that find its weights in memory, not in the cache of the device.

A model whose weights are larger than that cache reads all of them anew at each call, while somebody who calls one site
over and over finds its weights there. For a few rows that makes most of the time.
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

# The weights of the calls in a row are together so many times as large as the cache, or are taken for hot where that
# would need more calls than this.
BEYOND, MOST_CALLS = 1.5, 64
# Only where so many times the cache's size is free: the copies are made for each strategy.
SPARE = 16


def are_cold(region: Region, live: LiveTensors, device: torch.device) -> bool:
    """Whether the weights of ``region`` are larger than the cache of ``device``."""
    held = (live.tensor(node) for node in region.graph.nodes if is_weight(node))
    return device.type == "cuda" and sum(tensor.nbytes for tensor in held) > _cache_bytes(device)


def calls_beyond_cache(sample: Sample, device: torch.device) -> int:
    """How many calls of the site, each with weights of its own, read more than the cache holds; 1 where its weights are
    too small to matter, or are not all that the original calls read, or where there is too little memory."""
    if torch.cuda.mem_get_info(device)[0] < SPARE * _cache_bytes(device):
        return 1
    own = _bytes(_tensors_of(sample))
    calls = int(BEYOND * _cache_bytes(device) / max(own, 1)) + 1
    read = _bytes(sample.arguments[index] for index in _weights_among(sample))
    return calls if 1 < calls <= MOST_CALLS and read >= own else 1


def originals_with_own_weights(sample: Sample, calls: int) -> list[Callable[[], Any]]:
    """So many calls of the original, each of which reads other weights."""
    weights = _weights_among(sample)

    def copied() -> list[Any]:
        return [each.clone() if index in weights else each for index, each in enumerate(sample.arguments)]

    return [sample.original, *(partial(sample.subgraph, *copied()) for _ in range(calls - 1))]


def modules_with_own_weights(sample: Sample, calls: int) -> list[nn.Module]:
    """So many fused modules of the site, each of which has other weights; the first is its own."""
    module = sample.site.replacement.module
    return [module, *(copy.deepcopy(module) for _ in range(calls - 1))]


def _weights_among(sample: Sample) -> set[int]:
    """Which of the arguments of the original calls are weights of the fused module, or views of such."""
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
