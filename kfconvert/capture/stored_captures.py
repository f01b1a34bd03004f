"""Captures as JSON values, so that another process need not trace the model again.

The graphs are valid for a model with the same evidence, see ``runtime.state.evidence``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..inputs import CallForm, ClassName, build, class_name
from ..region import CaptureError, Region, made_region, stored_graph
from ..runtime import RanCode, configurations, evidence_of
from .captured import Capture, unfit_tensor
from .trial_runs import check_outputs, trial

_LOG = logging.getLogger(__name__)

# A region and the paths of the modules that it was captured for.
Places = tuple[Region, list[str]]


def stored_region(
    model: nn.Module, device: torch.device, region: Region, paths: list[str], classes: dict[ClassName, type]
) -> dict[str, Any] | None:
    """Returns the stored form of ``region``. None if it could not be rebuilt, or a tensor of one of its modules has
    changed in kind."""
    graph = stored_graph(region)
    if graph is None:
        return None
    stored = {"graph": graph, "example": region.example, "modules": paths}
    try:
        arguments, again = rebuilt_region(model, device, stored, classes)
        leaves = again.call.leaves((), arguments)
        same = leaves is not None and again.guard.refusal(leaves) is None
        same = same and all(unfit_tensor(model.get_submodule(path), again) is None for path in paths)
    except Exception as reason:  # on any error, the module is traced again
        _LOG.debug("a graph is not stored: %s: %s", type(reason).__name__, reason)
        return None
    alike = (again.guard, again.reads, again.outputs) == (region.guard, region.reads, region.outputs)
    return stored if same and alike else None


def rebuilt_region(
    model: nn.Module, device: torch.device, stored: dict[str, Any], classes: dict[ClassName, type]
) -> tuple[dict[str, Any], Region]:
    """Returns the arguments and the region of the first module of a stored graph."""
    arguments = build(stored["example"], device)
    form = CallForm(model.get_submodule(stored["modules"][0]).forward, (), arguments)
    return arguments, made_region(stored["graph"], form, stored["example"], classes)


def evidence_of_regions(model: nn.Module, places: Iterable[Places]) -> str:
    """Returns the digest of everything that traces of these regions depend on. Raises NoEvidence."""
    places = list(places)
    reads = frozenset(read for region, _ in places for read in region.reads)
    slots = {
        (".".join(filter(None, (path, inner))), name)
        for region, paths in places
        for path in paths
        for inner, name in region.slots.values()
    }
    return evidence_of(model, reads, slots)


def named_classes(model: nn.Module) -> dict[ClassName, type]:
    """Returns the classes whose attributes may have been read, by name; ambiguous names are omitted."""
    kinds = dict.fromkeys(type(each) for each in (*model.modules(), *configurations(model)))
    names = [class_name(kind) for kind in kinds]
    return {name: kind for name, kind in zip(names, kinds) if names.count(name) == 1}


@torch.no_grad()
def checked_code(captured: Capture) -> str:
    """Compares the graph of ``captured`` with its module for a few entries of its example, and returns a digest of the
    code that the module ran.

    Raises:
        CaptureError: the outputs differ, or cannot be compared.
    """
    region, ran = captured.region, RanCode(captured.module)
    seen = trial(ran, region, captured.leaves)
    if seen is None or region.is_random or seen.refusal is not None:
        raise CaptureError("its outputs cannot be compared")
    check_outputs(region, captured.run_graph, seen)
    return ran.digest()
