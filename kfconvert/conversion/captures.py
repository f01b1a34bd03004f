"""The captured call forms and parts of a model, and the reasons for modules that were not captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..capture import (
    Budget,
    Capture,
    Known,
    Part,
    Parts,
    Refused,
    capture_form,
    capture_generation,
    methods_with_modules,
    parents,
    reads_layout,
    refused_in_every_form,
    with_few,
)
from ..generation import runs_usual_loop, selects_other_mode
from ..graph import blame, definition
from ..inputs import ExampleCall, is_token_model, token_calls
from ..process import without_cudnn_attention
from ..region import CaptureError
from .effort import Effort
from .preparation import Prepared
from .remembered_graphs import RememberedGraphs
from .stages import Stages

# Seconds of processor time: for one form of the whole model, whatever the effort, and for the parts if captures have a
# budget.
WHOLE_SECONDS, PARTS_SECONDS = 300.0, 4.0
# If the model was captured as a whole, its parts only serve calls that the guard refuses. Their captures take at most
# this share of the time of the whole, or PARTS_SECONDS if that is more.
PARTS_SHARE = 0.5
# Limits of the processor time for a call that ``generate`` makes: in seconds, and as a multiple of the example call's.
STEP_SECONDS, LONGER = 20.0, 3.0


@dataclass(frozen=True)
class Captures:
    """``forms`` of the whole model, the example's first, and its ``parts``.

    ``regions`` has each attempted region, the example call of the model first: whether it was captured, or why not.
    ``left_out`` is the number of submodules that were skipped for lack of time, ``remembered`` the number of forms
    whose graphs are of an earlier conversion.
    """

    forms: tuple[Capture, ...]
    parts: tuple[Part, ...]
    regions: tuple[dict[str, Any], ...]
    left_out: int = 0
    remembered: int = 0

    @property
    def example(self) -> Capture | None:
        """The capture of the model that serves the example call."""
        return self.forms[0] if self.forms and self.regions[0]["captured"] else None

    @property
    def others(self) -> tuple[Capture, ...]:
        """The captures of the model that serve other calls."""
        return self.forms[self.example is not None :]

    def every(self) -> Iterator[Capture]:
        """Yields the captures of the whole model, then those of its parts."""
        yield from self.forms
        for part in self.parts:
            yield from part.captures

    def outermost(self) -> list[Capture]:
        """Returns the captures that serve the example call: of the model, or of the outermost parts."""
        if self.example is not None:
            return [self.example]
        paths = {captured.path for captured in self.every()}
        return [captured for captured in self.every() if paths.isdisjoint(parents(captured.path))]


def trace(prepared: Prepared, stages: Stages, effort: Effort, replayed: bool = False) -> Captures:
    """Captures the call as given, the other usual call forms of a token model, and the parts, as far as ``effort``
    allows.

    ``replayed``: CUDA graphs will replay the programs, so a step of ``generate`` is captured on a static cache, too.
    """
    model, calls = prepared.model, [prepared.call]
    if effort.other_calls and is_token_model(model):
        calls += token_calls(model, prepared.call)
    budget = Budget(effort.for_captures(stages.spent(), prepared.seconds))
    with stages.stage("trace", len(calls) + 1) as advance, without_cudnn_attention():
        graphs = RememberedGraphs(prepared, f"{effort.name} {replayed}")
        begin = stages.spent()
        refusal = refused_in_every_form(model, prepared.counting, prepared.outputs)
        found = list[Capture | CaptureError]()
        for call in calls:
            captured = refusal or graphs.known(call, call)
            found.append(captured or capture_form(model, call, min(WHOLE_SECONDS, budget.left() - PARTS_SECONDS)))
            advance()
        first = found[0] if isinstance(found[0], Capture) else None
        cheap = None
        if first is not None:  # a few entries in each size that it leaves free
            cheap = ExampleCall((), first.region.call.keywords(with_few(first.region, first.leaves)))
        prepared.own_state.resettle()
        fewest = not effort.other_calls
        whole = max(stages.spent() - begin, graphs.seconds)
        with budget.paused():
            steps = captured_steps(
                model,
                prepared.call,
                found[0],
                prepared.own_state.resettle,
                replayed,
                fewest,
                whole / len(calls),
                graphs.known,
            )
        calls += [each for each, _ in steps]
        found += [captured for _, captured in steps]
        graphs.save(zip(calls, found), whole)
        parts = Parts(model, prepared.counting, prepared.own_state.resettle, fewest, budget)
        if first is None:
            parts.search(prepared.call, cheap)
        elif effort.other_calls:
            parts.search(prepared.call, cheap, True, _entries(model), max(PARTS_SECONDS, PARTS_SHARE * whole))
        for call, _ in prepared.methods:
            parts.search(call)
        note_layouts(model, parts.found, [prepared.call, *(call for call, _ in prepared.methods)])
        prepared.own_state.resettle()  # removes state that the last traces left
        prepared.own_state.release()
        advance()
    return gathered(model, calls, found, parts.found, parts.refused, parts.left_out, graphs.found)


def captured_steps(
    model: nn.Module,
    call: ExampleCall,
    first: Capture | CaptureError,
    put_back: Callable[[], None],
    replayed: bool,
    fewest: bool,
    seconds: float = math.inf,
    known: Known = lambda call, example: None,
) -> list[tuple[ExampleCall, Capture | CaptureError]]:
    """Returns the captures of the calls that ``generate`` makes, see ``capture_generation``. The step on a static cache
    is among them only if the loop of recorded steps can serve the model, and with ``fewest`` its default mode.

    ``seconds``: processor time of the capture of ``call``. ``known`` returns the captures that need no trace.
    """
    communicates = isinstance(first, Capture) and first.region.communicates
    static = replayed and not communicates and runs_usual_loop(model)
    static = static and not (fewest and selects_other_mode(model))
    limit = max(STEP_SECONDS, LONGER * seconds)
    return capture_generation(model, call, first, put_back, static, fewest, limit, known)


def note_layouts(model: nn.Module, parts: Sequence[Part], calls: Sequence[ExampleCall]) -> None:
    """Notes whether code that uses the outputs of ``parts`` in ``calls`` depends on their memory layout. Without calls,
    assumes that it does."""
    captured = [each for part in parts for each in part.captures]
    read = not calls or reads_layout(model, (each.module for each in captured), calls)
    for each in captured:
        each.region.has_fixed_layouts |= read


def _entries(model: nn.Module) -> frozenset[nn.Module]:
    """Returns the children of ``model`` that methods other than ``forward`` call."""
    children = dict(model.named_children())
    return frozenset(children[name] for names in methods_with_modules(model).values() for name in names)


def gathered(
    model: nn.Module,
    calls: Sequence[ExampleCall],
    found: Sequence[Capture | CaptureError],
    parts: Sequence[Part],
    refused: Sequence[Refused] = (),
    left_out: int = 0,
    remembered: int = 0,
) -> Captures:
    """Returns ``found`` for each of the ``calls``, and ``parts``. Adds the ``refused`` regions if the first call
    was not captured."""
    forms = tuple(form for form in found if isinstance(form, Capture))
    regions = [
        _region(model, call.summary(), "", form if isinstance(form, CaptureError) else None)
        for call, form in zip(calls, found)
    ]
    regions += [_region(model, captured.path, captured.path) for part in parts for captured in part.captures]
    distinct = {(each.path, str(each.error)): each for each in refused}  # from searches for several example calls
    captured = bool(found) and isinstance(found[0], Capture)
    regions += [_region(model, each.path, each.path, each.error) for each in (() if captured else distinct.values())]
    return Captures(forms, tuple(parts), tuple(regions), left_out, remembered)


def _region(model: nn.Module, name: str, module: str, error: CaptureError | None = None) -> dict[str, Any]:
    region = {"name": name, "module": module, "captured": error is None, "reason": None, "location": None}
    if error is not None:
        region["reason"] = str(error)
        region["location"] = blame(error) or definition(model.get_submodule(module))
    return region
