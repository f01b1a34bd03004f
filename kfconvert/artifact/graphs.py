"""``graphs.json``: the graphs traced in a conversion, so that ``load`` need not trace them again.

``load`` uses them if the evidence is the same (see ``runtime.state.evidence``), and traces the model otherwise. The
program checks the same state in both cases: it depends only on the reads of the trace, and on the loaded model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..capture import Capture, recaptured, unfit_tensor
from ..inputs import CallForm, ClassName, build, class_name
from ..region import Read, Region, Unstorable, kept, made_reads, made_region
from ..runtime import ELEMENTS, Codes, NoEvidence, configurations, evidence_of, guarded_forward
from .schema import StoredRegion

_LOG = logging.getLogger(__name__)


def stored_graphs(
    model: nn.Module,
    device: str,
    calls: list[Region],
    generation: list[Region],
    parts: list[tuple[Region, list[str]]],
) -> dict[str, Any] | None:
    """Returns the content of ``graphs.json`` for a converted ``model``; None if no graph can be stored.

    Args:
        device: the device in its record.
        calls: the regions of the calls in its record.
        generation: the regions of the calls that ``generate`` makes.
        parts: the regions of the parts in its record, each with the paths of its modules.
    """
    every = [*((region, [""]) for region in (*calls, *generation)), *parts]
    classes = _classes(model)
    stored = {
        id(region): _usable(region, [model.get_submodule(path) for path in paths], classes, device)
        for region, paths in every
    }
    usable = [(region, paths) for region, paths in every if stored[id(region)] is not None]
    asked = frozenset[str]().union(*(region.asked for region, _ in every))
    # A call built from the record has other elements, which no trace reads, but also other values of some tensor
    # properties.
    if not usable or asked - {ELEMENTS} or any(region.is_read_by_layout for region, _ in every):
        return None
    if not _is_as_converted(model):
        return None
    reads = frozenset[Read]().union(*(region.reads for region, _ in usable))
    try:
        slots = _slots((stored[id(region)], paths) for region, paths in usable)
        told = evidence_of(model, reads, slots, looks=ELEMENTS in asked)
    except NoEvidence as reason:
        _LOG.debug("the graphs of %s are not stored: %s", type(model).__name__, reason)
        return None
    return {
        "format": 1,
        "device": device,
        "evidence": told,
        "calls": [stored[id(region)] for region in calls],
        "generation": _all_with_examples(generation, [stored[id(region)] for region in generation]),
        "parts": [stored[id(region)] for region, _ in parts],
    }


def _all_with_examples(regions: list[Region], stored: list[dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    """Returns None if there are no regions, or one cannot be stored."""
    if not stored or None in stored:
        return None
    return [{"graph": graph, "example": region.example} for graph, region in zip(stored, regions)]


def _usable(
    region: Region, modules: list[nn.Module], classes: dict[ClassName, type], device: str
) -> dict[str, Any] | None:
    """Returns the stored form of ``region``. None if ``load`` could not rebuild it, or a tensor of one of its
    ``modules`` has changed in kind."""
    stored = kept(region)
    if stored is None:
        return None
    try:
        StoredRegion.model_validate(stored)
        made = made_region(stored, region.call, region.example, classes)
        leaves = region.call.leaves((), build(region.example, device))
        same = made.reads == region.reads and leaves is not None and made.guard.refusal(leaves) is None
        same = same and all(unfit_tensor(module, made) is None for module in modules)
    except Exception as reason:  # on any error, load traces again
        _LOG.debug("a graph is not stored: %s: %s", type(reason).__name__, reason)
        return None
    return stored if same else None


def _is_as_converted(model: nn.Module) -> bool:
    """Whether everything that the graphs depend on is unchanged since the trace."""
    guarded = [each for each in map(guarded_forward, model.modules()) if each is not None]
    return all(each.state.change() is None for each in guarded)


def _classes(model: nn.Module) -> dict[ClassName, type]:
    """Returns the classes whose attributes may have been read, by name; ambiguous names are omitted."""
    kinds = dict.fromkeys(type(each) for each in (*model.modules(), *configurations(model)))
    names = [class_name(kind) for kind in kinds]
    return {name: kind for name, kind in zip(names, kinds) if names.count(name) == 1}


def _slots(stored: Iterable[tuple[Any, list[str]]]) -> set[tuple[str, str]]:
    """Returns the places of all tensors that these stored regions read in the modules at these paths."""
    return {
        (".".join(filter(None, (path, inner))), name)
        for each, paths in stored
        for path in paths
        for inner, name in each["slots"].values()
    }


class Graphs:
    """The stored graphs of a record that match ``model``, which is converted with that record.

    Args:
        stored: the content of ``graphs.json``, in the form ``schema.StoredGraphs``; None if there is none.
        parts: as in the record.
        asked: the tensor properties that the model's code reads, as in the record.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        stored: dict[str, Any] | None,
        parts: list[dict[str, Any]],
        asked: frozenset[str],
    ):
        self._model, self._device = model, device
        self._classes = _classes(model)
        self._calls: list[Any] = []
        self._parts: list[Any] = []
        self._generation: list[Any] | None = None
        # The code of the model at the time of the match.
        self.codes = Codes()
        if stored is None:
            return
        reason = self._misfit(device, stored, parts, ELEMENTS in asked)
        if reason is None:
            self._calls, self._parts, self._generation = stored["calls"], stored["parts"], stored.get("generation")
        else:
            _LOG.warning("%s is traced again, as its stored graphs are not used: %s", type(model).__name__, reason)

    def _misfit(
        self, device: torch.device, stored: dict[str, Any], parts: list[dict[str, Any]], looks: bool
    ) -> str | None:
        """Returns why the graphs are not used, None if they are."""
        if str(device) != stored["device"]:
            return f"they are for {stored['device']}, and the model is on {device}"
        generation = [each["graph"] for each in stored.get("generation") or ()]
        found = [(each, [""]) for each in (*stored["calls"], *generation)]
        found += [(each, part["modules"]) for each, part in zip(stored["parts"], parts)]
        found = [(each, paths) for each, paths in found if each is not None]
        try:
            reads = frozenset[Read]().union(*(made_reads(each, self._classes) for each, _ in found))
            told = evidence_of(self._model, reads, _slots(found), looks, self.codes)
        except (NoEvidence, Unstorable) as reason:
            return str(reason)
        except (AttributeError, KeyError):  # for missing modules
            return "the model has other modules"
        if told != stored["evidence"]:
            return "the model, its code or the libraries changed after it was saved"
        return None

    def are_all(self, generates: bool) -> bool:
        """Whether nothing in the record needs a trace; ``generates``: as in its statistics."""
        whole = bool(self._calls) and None not in (*self._calls, *self._parts)
        return whole and not (generates and self._generation is None)

    def call(self, number: int, arguments: dict[str, Any], example: Any) -> Capture | None:
        """Returns the capture of the record's call ``number``; None if it must be traced. Raises Unstorable."""
        return self._made(self._calls, number, "", self._model, arguments, example)

    def generation(self) -> list[tuple[dict[str, Any], Capture]] | None:
        """Returns arguments and capture of each call that ``generate`` makes; None if they must be traced. Raises
        Unstorable, or InputSpecError."""
        if self._generation is None:
            return None
        found = []
        for each in self._generation:
            arguments = build(each["example"], self._device)
            found.append((arguments, self._recaptured(each["graph"], "", self._model, arguments, each["example"])))
        return found

    def part(self, number: int, path: str, arguments: dict[str, Any], example: Any) -> Capture | None:
        """Returns the capture of the module at ``path``, the first in the part ``number``; otherwise like ``call``."""
        return self._made(self._parts, number, path, self._model.get_submodule(path), arguments, example)

    def _made(
        self, stored: list[Any], number: int, path: str, module: nn.Module, arguments: dict[str, Any], example: Any
    ) -> Capture | None:
        if number >= len(stored) or stored[number] is None:
            return None
        return self._recaptured(stored[number], path, module, arguments, example)

    def _recaptured(
        self, stored: dict[str, Any], path: str, module: nn.Module, arguments: dict[str, Any], example: Any
    ) -> Capture:
        form = CallForm(module.forward, (), arguments)
        region = made_region(stored, form, example, self._classes)
        return recaptured(module, path, region, form.leaves((), arguments))
