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
# A placeholder for the outputs of a hook that does not name them.
_ANYTHING = "outputs"


def is_recording_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _HOME


def recorded_outputs(modules: Iterable[nn.Module]) -> frozenset[str]:
    """The outputs that the recording hooks of ``modules`` collect, such as "attentions"."""
    hooks = (hook for module in modules for hook in module._forward_hooks.values())
    return frozenset(_recorded(hook) for hook in hooks if is_recording_hook(hook))


def wanted_outputs() -> frozenset[str]:
    """The outputs that an outer call in this thread records."""
    collector = getattr(sys.modules.get(_HOME), "_active_collector", None)
    wanted = collector.get() if collector is not None else None
    return frozenset((*wanted, _ANYTHING)) if wanted else frozenset()


def _recorded(hook: Any) -> str:
    names = hook.__code__.co_freevars
    key = hook.__closure__[names.index("key")].cell_contents if "key" in names else None
    return key if isinstance(key, str) else _ANYTHING
