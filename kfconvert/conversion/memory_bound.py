"""The memory limit of derived weights: drops the sites with the smallest gain first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..capture import Capture
from ..matching import Site
from ..profiling import allocation, bytes_of, bytes_text
from ..runtime import Program
from .captures import Captures
from .checks import ConversionError
from .preparation import Prepared
from .steps import merge_weights

# More than the memory of any machine, and less than the largest number in an artifact.
MOST_BYTES = 2**62


def allowed_bytes(model: nn.Module, limit: float) -> int:
    """Returns ``limit`` in bytes: an int is bytes, a float a share of the memory of the weights and buffers."""
    weights = 1 if isinstance(limit, int) else bytes_of([*model.parameters(), *model.buffers()])
    return int(min(limit * weights, MOST_BYTES))


def drop_for_memory(prepared: Prepared, captures: Captures, limit: float) -> bool:
    """Reject applied sites until all programs together keep at most ``limit``, as measured with their examples. Returns
    whether any site was rejected. Programs of the example call come first; the others share the remaining memory.

    Raises:
        ConversionError: the memory on this device cannot be measured, or a profiler is active in this thread.
    """
    left, dropped = allowed_bytes(prepared.model, limit), False
    every = [(captured, captured.variant(captured.applied)) for captured in captures.every()]
    # As in the delivered model: weights that are contiguous in memory are not copied.
    merge_weights(prepared.model, {"": [variant for _, variant in every]})
    for captured, variant in every:
        kept = _kept(variant.program, captured, prepared.device)
        total = sum(size for _, size in kept)
        least: list[tuple[Site, int]] = []
        for item in sorted(kept, key=_gain):
            if total > left:
                least.append(item)
                total -= item[1]
        for site, size in reversed(least):
            if total + size <= left:  # it fits after a larger one was dropped
                total += size
                continue
            dropped = True
            site.reject(
                f"max_extra_memory: its derived weights take {bytes_text(size)}, and {bytes_text(left - total)} of "
                f"{bytes_text(left)} are left for {captured.path or 'calls like this'}"
            )
        left -= total
    return dropped


def _gain(kept: tuple[Site, int]) -> tuple[float, int]:
    """Sort key of sites by saved time; sites without timing sort by memory, the largest first."""
    site, size = kept
    if site.original_us is None or site.fused_us is None:
        return 0.0, -size
    return site.original_us - site.fused_us, -size


@torch.no_grad()
def _kept(program: Program, captured: Capture, device: torch.device) -> list[tuple[Site, int]]:
    """Returns the applied sites whose plans keep memory, each with its bytes."""
    sizes: dict[str, int] = {}

    def measured(name: str, call: Callable[..., Any], *inputs: Any) -> Any:
        found = allocation(partial(call, *inputs), device)
        if found is None:
            raise ConversionError(f"max_extra_memory cannot be enforced: memory cannot be measured on {device} now")
        sizes[name] = max(0, found.kept)
        return getattr(plans, name)(*inputs)  # the plan from the first call, whose result is freed

    program.clear()
    plans = program.plans(captured.leaves)
    first_calls = {name: getattr(plans, name) for name in program.fused}
    for name, call in first_calls.items():
        setattr(plans, name, partial(measured, name, call))
    try:
        program.computed(plans, captured.leaves)
    finally:
        program.clear()
    return [(site, sizes[name]) for name, site in zip(program.fused, captured.applied) if sizes.get(name)]
