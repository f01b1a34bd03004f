"""Memory before and after a conversion, measured with the example: weights, derived weights, peak of a forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..profiling import allocation, bytes_of
from ..runtime import originals
from .captures import Captures
from .memory_bound import allowed_bytes
from .preparation import Prepared
from .stages import Stages


def memory(prepared: Prepared, captures: Captures, stages: Stages, bound: float | None) -> dict[str, Any]:
    """Returns bytes for ``conversion_stats``. The converted model has its programs, which have not run yet.

    ``bound``: the limit of derived weights, see ``ModelConverter``.
    """
    model, device = prepared.model, prepared.device
    call = partial(prepared.call.copied(), model)
    copies = [tensor for captured in captures.every() for tensor in captured.live.copies()]
    first = before = after = None
    if any(captured.applied for captured in captures.outermost()):
        with stages.stage("memory", 1) as advance, torch.no_grad():
            with originals():
                before = allocation(call, device)
            first, after = allocation(call, device), allocation(call, device)
            advance()
    return {
        "weights": bytes_of([*model.parameters(), *model.buffers()]),
        "derived": first.kept + bytes_of(copies) if first else None,
        "allowed": None if bound is None else allowed_bytes(model, bound),
        "peak": {"original": before.peak if before else None, "converted": after.peak if after else None},
    }
