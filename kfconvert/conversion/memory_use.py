"""Memory before and after a conversion, measured with the example: weights, derived weights, peak of a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..profiling import Allocation, allocation, bytes_of
from ..runtime import originals
from .captures import Captures
from .memory_bound import allowed_bytes
from .preparation import Prepared
from .stages import Stages


def memory(prepared: Prepared, captures: Captures, stages: Stages, bound: float | None) -> dict[str, Any]:
    """Returns bytes for ``conversion_stats``. The converted model has its programs, which have not run yet.

    ``bound``: the limit of derived weights, see ``ModelConverter``.
    """
    model, own = prepared.model, prepared.call.copied()

    def converted() -> Any:
        return own(model)

    def original() -> Any:
        with originals():
            return converted()

    def allocated(call: Callable[[], Any]) -> Allocation | None:
        with torch.no_grad():
            return allocation(call, prepared.device)

    first = before = after = None
    if any(captured.applied for captured in captures.outermost()):
        with stages.stage("memory", 1) as advance:
            before, first, after = allocated(original), allocated(converted), allocated(converted)
            advance()
    return {
        "weights": bytes_of([*model.parameters(), *model.buffers()]),
        "derived": first.kept if first else None,
        "allowed": None if bound is None else allowed_bytes(model, bound),
        "peak": {"original": before.peak if before else None, "converted": after.peak if after else None},
    }
