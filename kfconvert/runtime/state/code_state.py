"""Checks whether the code behind a model, and the switches that it reads, have changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...process import switched_off
from ...region import Read
from .code import CodeWalk
from .references import Holdings
from .watch import Places

# Switches that code can read.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "allow_tf32": lambda: (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "get_default_device": torch.get_default_device,
    "get_autocast_dtype": lambda: (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
}


class Codes:
    """The code behind modules that are looked up in sequence, without changes in between. Layers of equal structure
    share one code."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Code] = {}

    def of(self, held: Holdings, reads: frozenset[Read]) -> Code:
        classes = tuple(dict.fromkeys(map(type, (*held.model.modules(), *held.outside, *held.configurations))))
        key = classes, tuple(map(id, held.functions)), reads
        if key not in self._known:
            self._known[key] = Code(CodeWalk(classes, held.functions, reads))
        return self._known[key]


class Code:
    """The Python code behind a model, which all copies of the model share."""

    def __init__(self, walk: CodeWalk):
        self.asked_for = frozenset(walk.asked_for)
        self.functions = walk.functions()
        self.switches = {name: asked() for name, asked in _SWITCHES.items() if name in self.asked_for}
        self.places = Places(walk.entries())
        self.places.change()  # resolves the attribute dicts of the entries

    def switched(self) -> str | None:
        """The changed process switch that the code reads; None where all have their former values."""
        for name, before in self.switches.items():
            if _SWITCHES[name]() != before:
                return f"the model's code reads {name}, which was {before} at the conversion"
        return None

    def refusal(self) -> str | None:
        """None where the code is unchanged, else the reason. Not checked while a conversion in another thread replaces
        functions, which behave as before for this thread."""
        reason = self.places.change()
        if reason is None or switched_off() or torch.compiler.is_exporting():
            return None
        return reason

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self
