"""No more memory for what is derived than allowed: the sites that gain least are dropped first."""

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
from .preparation import ConversionError, Prepared
from .steps import merge_weights

# More than any machine has, and less than what artifacts can tell.
MOST_BYTES = 2**62


def allowed_bytes(model: nn.Module, limit: float) -> int:
    """``limit``: bytes where it is an int, else a share of the memory of the weights and buffers."""
    weights = 1 if isinstance(limit, int) else bytes_of([*model.parameters(), *model.buffers()])
    return int(min(limit * weights, MOST_BYTES))


def drop_for_memory(prepared: Prepared, captures: Captures, limit: float) -> bool:
    """Reject applied sites until all programs together keep ``limit`` at most, as measured with their examples; whether
    any was. Programs that serve the example call come first; what these leave is for the others.

    Raises:
        ConversionError: it cannot be measured on this device, or while this thread is being profiled.
    """
    left, dropped = allowed_bytes(prepared.model, limit), False
    every = [(captured, captured.variant(captured.applied)) for captured in captures.every()]
    # As in the model that is handed over: weights that lie below each other are not copied.
    prepared.moved += merge_weights(prepared.model, {"": [variant for _, variant in every]})
    for captured, variant in every:
        kept = _kept(variant.program, captured, prepared.device)
        total = sum(size for _, size in kept)
        least: list[tuple[Site, int]] = []
        for item in sorted(kept, key=_gain):
            if total > left:
                least.append(item)
                total -= item[1]
        for site, size in reversed(least):
            if total + size <= left:  # there is place for it beside a larger one that is gone
                total += size
                continue
            dropped = True
            site.reject(
                f"max_extra_memory: what it derives takes {bytes_text(size)}, and {bytes_text(left - total)} of "
                f"{bytes_text(left)} are left for {captured.path or 'calls like this'}"
            )
        left -= total
    return dropped


def _gain(kept: tuple[Site, int]) -> tuple[float, int]:
    """Orders sites by the time that they gain; those that were not timed by what they keep, the largest first."""
    site, size = kept
    if site.original_us is None or site.fused_us is None:
        return 0.0, -size
    return site.original_us - site.fused_us, -size


@torch.no_grad()
def _kept(program: Program, captured: Capture, device: torch.device) -> list[tuple[Site, int]]:
    """The applied sites whose plans keep memory, and how much: bytes."""
    sizes: dict[str, int] = {}

    def measured(name: str, call: Callable[..., Any], *inputs: Any) -> Any:
        found = allocation(partial(call, *inputs), device)
        if found is None:
            raise ConversionError(f"max_extra_memory cannot be kept to: memory cannot be measured on {device} now")
        sizes[name] = max(0, found.kept)
        return getattr(plans, name)(*inputs)  # the plan that was made; the result of the first call is gone

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
