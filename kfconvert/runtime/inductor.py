"""Our operators, made known to Inductor before it meets one in a graph."""

from __future__ import annotations

import functools
import sys

import torch
from torch._library.utils import get_layout_constraint_tag

# From here on it writes its message about a new operator only where somebody reads it.
_LAZY = (2, 13)


def introduce_operators() -> None:
    """Let Inductor, where it is about to compile, take our operators as they are.

    It would do so by itself where it meets one for the first time. But before PyTorch 2.13 it then wrote down all that
    the arguments were computed of, for a log that nobody reads, and this text doubles with each residual connection in
    front of the operator: a ViT did not come to an end.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _LAZY and "torch._inductor" in sys.modules:
        _introduce()


@functools.cache
def _introduce() -> None:
    from torch._inductor import lowering  # which takes a second to import

    for name in torch.ops.kfconvert:
        operator = getattr(torch.ops.kfconvert, name).default
        if operator not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator))
            lowering.make_fallback(operator, layout_constraint=constraint, warn=False)
