"""The last steps of a conversion: programs in the place of forwards, their time, and what is said of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import ValidationResult
from ..inputs import ExampleCall
from ..profiling import Comparison, compare_timings
from ..runtime import (
    CALLS_BEFORE,
    MOST_RECORDINGS,
    CudaGraphs,
    Ledger,
    Variant,
    can_record,
    install,
    merge,
    originals,
    separate,
    uninstall,
)
from .captures import Captures
from .preparation import Prepared
from .stages import Stages
from .statistics import conversion_stats

# To time the original and the converted model, together.
SECONDS_PER_MODEL = 1.0
LEAST_ROUNDS = 3
# The names, among the timings, of the converted model as it is not handed over.
WITH_GRAPHS, WITHOUT_GRAPHS = "with CUDA graphs", "without CUDA graphs"

# After so many calls writes to weights that leave no trace are looked for. On CUDA each look is a pass over all weights
# that the host has to wait for.
CHECK_WEIGHTS = {"cpu": 100}


@dataclass(frozen=True)
class Result:
    """A finished conversion: the model with its programs (``ledger`` knows them), and what was found on the way."""

    model: nn.Module
    device: torch.device
    call: ExampleCall
    captures: Captures
    ledger: Ledger
    seconds: dict[str, float]
    asked: frozenset[str]
    not_written: frozenset[str]
    check_weights: int
    accuracy: ValidationResult | None = None
    timings: Comparison | None = None
    reverted: str | None = None
    memory: dict[str, Any] | None = None
    remembered: int = 0


def programs(captures: Captures, stages: Stages) -> dict[str, list[Variant]]:
    """By path: those of every call form of the whole model, and of every part in which a site is applied."""
    every = list(captures.every())
    variants: dict[str, list[Variant]] = {}
    with stages.stage("replace", len(every)) as advance:
        for captured in every:
            if captured.path == "" or captured.applied:
                variants.setdefault(captured.path, []).append(captured.variant(captured.applied))
            advance()
    return variants


def replace(
    model: nn.Module,
    variants: dict[str, list[Variant]],
    max_recordings: int = MOST_RECORDINGS,
    static_outputs: bool = False,
) -> Ledger:
    """Put the programs in the place of forwards, with so many CUDA graphs of each at most."""
    ledger = install(model, variants, {}, max_recordings, static_outputs)
    ledger.warning.given = True  # until it is handed over: misses within a conversion concern nobody
    return ledger


def merge_weights(model: nn.Module, variants: dict[str, list[Variant]]) -> list[Tensor]:
    """Where the programs of ``model`` read several of its parameters as one tensor, let these lie in memory as one,
    so that no program keeps a copy. A parameter lies in one such tensor; where it would have to lie in
    another as well, there is a copy of that. Returns what held the parameters until now, see ``runtime.merge``."""
    parameters, moved, before = set(map(id, model.parameters())), set[int](), list[Tensor]()
    programs = [variant.program for found in variants.values() for variant in found]
    for program in programs:
        program.clear()  # what it holds on to of the weights would be in the way
    for weights in (weights for program in programs for weights in program.merged_weights()):
        ids = set(map(id, weights))
        if ids <= parameters and ids.isdisjoint(moved) and (old := merge(weights)) is not None:
            moved |= ids
            before += old
    return before


def time(
    prepared: Prepared, captures: Captures, ledger: Ledger, cuda_graphs: bool | None, stages: Stages
) -> Comparison | None:
    """The original against the converted model; None where nothing was converted.

    Args:
        cuda_graphs: whether the converted model records CUDA graphs; None where it does if that is faster. What was
            decided is set in ``ledger.graphs``, and the other is among the timings where both were tried.
    """
    graphs = ledger.graphs
    graphs.enabled = cuda_graphs is not False and can_record(prepared.device)
    if not any(captured.applied for captured in captures.outermost()):
        return None
    own = prepared.call.copied()

    def converted() -> Any:
        return prepared.model(*own.args, **own.kwargs)

    def original() -> Any:
        with originals():
            return converted()

    def launched() -> Any:
        graphs.enabled = False
        try:
            return converted()
        finally:
            graphs.enabled = True

    with stages.stage("time", 1) as advance:
        candidates = {"original": original, "converted": converted}
        if graphs.enabled and _is_recorded(converted, graphs):
            candidates[WITHOUT_GRAPHS] = launched
        timings = compare_timings(
            candidates, prepared.device, budget_s=SECONDS_PER_MODEL, min_rounds=LEAST_ROUNDS, settled=True
        )
        if cuda_graphs is None and WITHOUT_GRAPHS in timings:
            if timings["converted"].median_ms > timings[WITHOUT_GRAPHS].median_ms:
                graphs.enabled = False
                graphs.clear()
                timings = timings.renamed({"converted": WITH_GRAPHS, WITHOUT_GRAPHS: "converted"})
        advance()
    return timings


def _is_recorded(call: Callable[[], Any], graphs: CudaGraphs) -> bool:
    """Whether ``call``, made often enough, is replayed from a recording."""
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 1):
            before = graphs.replays
            call()
    return graphs.replays > before


def calls_between_checks(wanted: int | None, device: torch.device) -> int:
    """After how many calls the weights are compared with what they were; 0 for never."""
    return CHECK_WEIGHTS.get(device.type, 0) if wanted is None else wanted


def hand_over(result: Result) -> dict[str, Any]:
    """The statistics, which the converted model carries as well; warns where nothing was fused."""
    model, ledger = result.model, result.ledger
    ledger.reset_counters()
    if result.reverted or not ledger.guarded:
        ledger.graphs.enabled = False
        ledger.graphs.clear()
    stats = ledger.stats = conversion_stats(result)
    ledger.begin(stats["check_weights"])
    for captured in result.captures.every():
        captured.region.release_graph()
    if result.reverted or not ledger.guarded:
        uninstall(model)
        separate(model.parameters())
        model.__dict__["kfconvert_info"] = partial(dict, stats, guard={"hits": 0, "misses": {}}, parts={})
    if stats["total_replaced"] == 0:
        warnings.warn(f"kfconvert fused nothing in {stats['model']}: {stats['nothing_fused']}", stacklevel=3)
    return stats
