"""The inputs for which the sites of each capture are decided."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..capture import Capture, observe
from ..inputs import ExampleCall, is_token_model, token_calls
from ..process import level_outside
from .captures import Captures
from .preparation import Prepared


@dataclass(frozen=True)
class Load:
    """Flat inputs of a captured module, and the share of its calls with such inputs."""

    leaves: list[Any]
    share: float = 1.0


class Loads:
    """The workloads of each capture: its inputs in the ``tune_for`` calls that it serves, else its example."""

    def __init__(self, prepared: Prepared, captures: Captures):
        self._found: dict[int, list[tuple[list[Any], float]]] = {}  # leaves and weights, by the id of a capture
        for call, weight in prepared.tuned:
            if not self._note(prepared, captures, call, weight):
                warnings.warn(
                    f"kfconvert: no captured graph serves calls with {call.summary()}", stacklevel=level_outside()
                )

    def of(self, captured: Capture) -> list[Load]:
        found = self._found.get(id(captured), [(captured.leaves, 1.0)])
        total = sum(weight for _, weight in found)
        return [Load(leaves, weight / total) for leaves, weight in found]

    def _note(self, prepared: Prepared, captures: Captures, call: ExampleCall, weight: float) -> bool:
        """Add ``call`` to the captures that serve it; returns whether there is one. Other forms of the model receive it
        in their form; parts receive it only if the model's graph does not accept it."""
        others = token_calls(prepared.model, call) if is_token_model(prepared.model) else []
        served = [(form, _taken(form, [call, *others])) for form in captures.forms]
        direct = any(_taken(form, [call]) is not None for form in captures.forms)
        if not direct:
            received = _received(prepared, captures, call)
            firsts = [part.captures[0] for part in captures.parts]
            served += [(first, _taken(first, [received[first.module]])) for first in firsts if first.module in received]
            direct = any(leaves is not None for captured, leaves in served if captured.path)
        for captured, leaves in served:
            if leaves is not None:
                self._found.setdefault(id(captured), []).append((leaves, weight))
        return direct


def _taken(captured: Capture, calls: list[ExampleCall]) -> list[Any] | None:
    """Returns the flat inputs of the first of ``calls`` that ``captured`` accepts; None if it accepts none."""
    return next((leaves for leaves in map(captured.taken, calls) if leaves is not None), None)


def _received(prepared: Prepared, captures: Captures, call: ExampleCall) -> dict[nn.Module, ExampleCall]:
    """Returns the inputs that captured modules of parts receive in ``call``."""
    try:
        return observe(prepared.model, call, [part.captures[0].module for part in captures.parts])
    finally:
        prepared.own_state.resettle()
