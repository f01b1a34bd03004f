"""The hooks by which transformers records attentions and hidden states of submodules.

transformers registers them on first use and leaves them in place. In later calls they have no effect, unless an outer
model call requests their outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_HOME = "transformers.utils.output_capturing"


def is_recording_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _HOME


def has_recording_hooks(modules: Iterable[nn.Module]) -> bool:
    return any(is_recording_hook(hook) for module in modules for hook in module._forward_hooks.values())


def recorded_outputs() -> list[str]:
    """The outputs that an outer call in this thread records, such as "attentions"."""
    collector = getattr(sys.modules.get(_HOME), "_active_collector", None)
    return sorted((collector.get() if collector is not None else None) or ())
