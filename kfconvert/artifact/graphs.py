"""``graphs.json``: the graphs traced in a conversion, so that ``load`` need not trace them again.

``load`` uses them if the evidence is the same (see ``runtime.state.evidence``), and traces the model otherwise. The
program checks the same state in both cases: it depends only on the reads of the trace, and on the loaded model.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from ..capture import (
    Capture,
    Places,
    evidence_of_regions,
    named_classes,
    rebuilt_region,
    recaptured,
    stored_region,
)
from ..conversion import first_line
from ..inputs import Unstorable
from ..region import Region
from ..runtime import NoEvidence, guarded_forward

_LOG = logging.getLogger(__name__)


def stored_graphs(
    model: nn.Module, device: str, calls: list[Region], generation: list[Region], parts: list[Places]
) -> dict[str, Any] | None:
    """Returns the content of ``graphs.json`` for a converted ``model``; None if no graph can be stored.

    Args:
        device: the device in its record.
        calls: the regions of the calls in its record.
        generation: the regions of the calls that ``generate`` makes.
        parts: the regions of the parts in its record, each with the paths of its modules.
    """
    every: list[Places] = [*((region, [""]) for region in (*calls, *generation)), *parts]
    if not every or not _is_as_converted(model):
        return None
    classes = named_classes(model)
    # A call built from the record has other values of the layouts that some regions require.
    stored = {
        id(region): None
        if region.has_fixed_layouts
        else stored_region(model, torch.device(device), region, paths, classes)
        for region, paths in every
    }
    steps = [stored[id(region)] for region in generation]
    if None in steps:  # load then traces all of them
        steps = []
        stored.update((id(region), None) for region in generation)
    usable = [(region, paths) for region, paths in every if stored[id(region)] is not None]
    try:
        evidence = evidence_of_regions(model, usable)
    except NoEvidence as reason:
        _LOG.debug("the graphs of %s are not stored: %s", type(model).__name__, reason)
        return None
    if not usable:
        return None
    return {
        "device": device,
        "evidence": evidence,
        "calls": [stored[id(region)] for region in calls],
        "generation": steps or None,
        "parts": [stored[id(region)] for region, _ in parts],
    }


def _is_as_converted(model: nn.Module) -> bool:
    """Whether everything that the graphs depend on is unchanged since the trace."""
    guarded = [each for each in map(guarded_forward, model.modules()) if each is not None]
    return all(each.state is None or each.state.change() is None for each in guarded)


class Graphs:
    """The captures of ``graphs.json`` for ``model``, with their arguments; none if the model is not the one that was
    saved, or the graphs cannot be rebuilt. The logger then reports why.

    ``calls`` and ``parts`` have the order of the record, with None for a graph that must be traced; ``generation`` has
    the calls that ``generate`` makes, None if they must be traced.

    Args:
        stored: the content of ``graphs.json``; None if there is none.
    """

    def __init__(self, model: nn.Module, device: torch.device, stored: dict[str, Any] | None):
        self.calls: list[tuple[dict[str, Any], Capture] | None] = []
        self.parts: list[tuple[dict[str, Any], Capture] | None] = []
        self.generation: list[tuple[dict[str, Any], Capture]] | None = None
        if stored is None:
            return
        try:
            self._make(model, device, stored)
        except Exception as error:  # from the values of the file, or code of the model
            known = isinstance(error, (Unstorable, NoEvidence))
            reason = str(error) if known else f"{type(error).__name__}: {first_line(error)}"
            _LOG.warning(
                "%s is traced again, because its stored graphs cannot be used: %s", type(model).__name__, reason
            )

    def _make(self, model: nn.Module, device: torch.device, stored: dict[str, Any]) -> None:
        if str(device) != stored["device"]:
            raise Unstorable(f"they are for {stored['device']}, and the model is on {device}")
        classes, places = named_classes(model), list[Places]()

        def made(each: dict[str, Any] | None) -> Any:
            if each is None:
                return None
            arguments, region = rebuilt_region(model, device, each, classes)
            places.append((region, each["modules"]))
            path, leaves = each["modules"][0], region.call.leaves((), arguments)
            return arguments, recaptured(model.get_submodule(path), path, region, leaves)

        calls, parts = list(map(made, stored["calls"])), list(map(made, stored["parts"]))
        generation = None if stored["generation"] is None else list(map(made, stored["generation"]))
        if evidence_of_regions(model, places) != stored["evidence"]:
            raise Unstorable("the model, its code or the libraries changed after it was saved")
        self.calls, self.parts, self.generation = calls, parts, generation

    def are_all(self, generates: bool) -> bool:
        """Whether nothing in the record needs a trace; ``generates``: as in its statistics."""
        whole = bool(self.calls) and None not in self.calls and None not in self.parts
        return whole and not (generates and self.generation is None)
