"""What of a model was captured: its call forms and its parts, and why others were not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..capture import (
    Capture,
    Part,
    Parts,
    Refused,
    capture_forms,
    capture_generation,
    only_assigned,
    parents,
    refused_in_every_form,
    with_few,
)
from ..graph import blame, definition
from ..inputs import ExampleCall, is_token_model, token_calls
from ..region import CaptureError
from ..runtime import LAYOUT, unsteady
from .effort import Effort
from .preparation import Prepared
from .stages import Stages


@dataclass(frozen=True)
class Captures:
    """``forms`` of the whole model, the one that was given first, and its ``parts``.

    ``regions`` tells of each that was tried whether it was captured, or why not; ``left_out`` how many submodules there
    was no time to look at.
    """

    forms: tuple[Capture, ...]
    parts: tuple[Part, ...]
    regions: tuple[dict[str, Any], ...]
    left_out: int = 0

    def every(self) -> Iterator[Capture]:
        """The captures of the whole model, then those of its parts."""
        yield from self.forms
        for part in self.parts:
            yield from part.captures

    def outermost(self) -> list[Capture]:
        """The captures that serve the example call: that of the model, or the parts that lie in no other."""
        if self.forms:
            return [self.forms[0]]
        paths = {captured.path for captured in self.every()}
        return [captured for captured in self.every() if paths.isdisjoint(parents(captured.path))]


def trace(prepared: Prepared, stages: Stages, effort: Effort, replayed: bool = False) -> Captures:
    """The call as given, the other forms in which people call a token model, and the parts of the model; of these what
    the ``effort`` has time for.

    ``replayed``: recordings of it will be replayed, so that a step of ``generate`` is captured on a static cache, too.
    """
    model, calls = prepared.model, [prepared.call]
    if effort.other_calls and is_token_model(model):
        calls += token_calls(model, prepared.call)
    with stages.stage("trace", len(calls) + 1) as advance, only_assigned(prepared.assigned):
        start = time.thread_time()
        refusal = refused_in_every_form(model, prepared.counting, prepared.outputs, prepared.asked)
        found = capture_forms(model, calls, advance, refusal)
        first = next((form for form in found if isinstance(form, Capture)), None)
        whole = None if first is None else time.thread_time() - start
        cheap = None if first is None else _cheap_call(first)
        prepared.settled.restore()
        replayed = replayed and not (first is not None and first.region.communicates)
        for each, captured in capture_generation(
            model, prepared.call, found[0], prepared.settled.restore, replayed, fewest=not effort.other_calls
        ):
            calls.append(each)
            found.append(captured)
        if first is not None and not effort.other_calls:
            advance()
            return gathered(model, calls, found, (), prepared.asked)
        parts = Parts(model, prepared.call, prepared.counting, prepared.settled.restore, cheap, whole)
        prepared.settled.restore()  # of what the last traces have left
        advance()
    kept = () if unsteady(prepared.asked) else parts.found
    return gathered(model, calls, found, kept, prepared.asked, parts.refused, parts.left_out)


def gathered(
    model: nn.Module,
    calls: Sequence[ExampleCall],
    found: Sequence[Capture | CaptureError],
    parts: Sequence[Part],
    asked: frozenset[str],
    refused: Sequence[Refused] = (),
    left_out: int = 0,
) -> Captures:
    """``found`` for each of the ``calls``, and ``parts``; those ``refused`` are named where no call was captured.

    ``asked``: what the model's code asks of tensors, see ``runtime.tensor_facts``.
    """
    forms = tuple(form for form in found if isinstance(form, Capture))
    regions = [
        _region(model, call.summary(), "", form if isinstance(form, CaptureError) else None)
        for call, form in zip(calls, found)
    ]
    regions += [_region(model, captured.path, captured.path) for part in parts for captured in part.captures]
    regions += [_region(model, each.path, each.path, each.error) for each in (() if forms else refused)]
    captures = Captures(forms, tuple(parts), tuple(regions), left_out)
    for captured in captures.every():
        captured.region.asked |= asked - {LAYOUT}
    for part in parts:
        for captured in part.captures:
            captured.region.is_read_by_layout = LAYOUT in asked
    return captures


def _cheap_call(captured: Capture) -> ExampleCall:
    """The example call with a few entries in each size that the captured model leaves free."""
    return ExampleCall((), captured.region.call.keywords(with_few(captured.region, captured.leaves)))


def _region(model: nn.Module, name: str, module: str, error: CaptureError | None = None) -> dict[str, Any]:
    region = {"name": name, "module": module, "captured": error is None, "reason": None, "location": None}
    if error is not None:
        region["reason"] = str(error)
        region["location"] = blame(error) or definition(model.get_submodule(module))
    return region
