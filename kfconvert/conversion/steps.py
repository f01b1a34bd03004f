"""Installation of the programs in a model, and delivery of the converted model."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..generation import install_generate
from ..process import level_outside
from ..region import store_graph
from ..runtime import CudaGraphs, Ledger, OnMiss, Variant, install, install_training, merge, separate, uninstall
from ..training import CompiledForward
from .captures import Captures
from .result import Result
from .stages import Stages
from .statistics import ConversionStats, conversion_stats

# The number of calls between checks for untraceable writes to weights. On CUDA, each check reads all weights, and the
# host waits for it.
CHECK_WEIGHTS = {"cpu": 100}
# The share of the weights whose previous memory is kept for ``_GRACE`` seconds, see ``_release``.
_MOST_KEPT, _GRACE = 0.05, 0.01


def programs(captures: Captures, stages: Stages, unfused: bool) -> dict[str, list[Variant]]:
    """Returns by path: the variants of each call form of the whole model, and of each part with an applied site.

    A variant without applied sites serves no calls, unless CUDA graphs may replay it and ``unfused`` programs are
    wanted for that."""
    every = list(captures.every())
    variants: dict[str, list[Variant]] = {}
    with stages.stage("replace", len(every)) as advance:
        for captured in every:
            if captured.path == "" or captured.applied:
                variant = captured.variant(captured.applied)
                serves = bool(captured.applied) or (unfused and variant.is_replayable)
                variants.setdefault(captured.path, []).append(dataclasses.replace(variant, serves=serves))
            advance()
    return variants


def replace(model: nn.Module, variants: dict[str, list[Variant]], graphs: CudaGraphs) -> Ledger:
    """Replace forwards, and previous programs, by these programs; ``graphs`` as in ``install``."""
    uninstall(model)
    ledger = install(model, variants, graphs)
    ledger.generate = install_generate(model)
    ledger.notices.silent = True  # until delivery: misses in a conversion are irrelevant
    return ledger


def merge_weights(model: nn.Module, variants: dict[str, list[Variant]]) -> None:
    """If the programs of ``model`` read several parameters as one tensor, make these contiguous in memory, so that no
    program keeps a copy. A parameter is in one such tensor; any further tensor gets a copy of it."""
    parameters, moved, before = {id(each): each for each in model.parameters()}, set[int](), list[Tensor]()
    most = sum(each.nbytes for each in parameters.values()) * _MOST_KEPT
    programs = [variant.program for found in variants.values() for variant in found]
    for program in programs:
        program.clear()  # frees its references to the weights
    for weights in (weights for program in programs for weights in program.merged_weights()):
        ids = set(map(id, weights))
        if ids <= parameters.keys() and ids.isdisjoint(moved) and (old := merge(weights)) is not None:
            moved |= ids
            before += old
            if sum(each.nbytes for each in before) > most:
                _release(before)
    _release(before)


def _release(before: list[Tensor]) -> None:
    """Frees the previous memory of weights. A call in another thread may have read their addresses, and launches its
    kernel at once."""
    if before:
        time.sleep(_GRACE)
        for device in {each.device for each in before if each.is_cuda}:
            torch.cuda.synchronize(device)
        before.clear()


def calls_between_checks(wanted: int | None, device: torch.device) -> int:
    """Returns the number of calls between checks of the weights; 0 for never."""
    return CHECK_WEIGHTS.get(device.type, 0) if wanted is None else wanted


def leave_as_it_is(model: nn.Module, stats: dict[str, Any], on_miss: OnMiss | None = None) -> None:
    """Give ``model``, which has no programs, the other attributes of a converted model."""
    ledger = install(model, {})
    ledger.stats, ledger.notices.on_miss = ConversionStats(stats), on_miss
    config = stats.get("config") or {}
    if config.get("training"):
        install_training(model, ledger, CompiledForward(config.get("cuda_graphs") is not False))


def hand_over(result: Result, on_miss: OnMiss | None = None) -> ConversionStats:
    """Returns the statistics, which the converted model has as well; warns if nothing was fused.

    Args:
        on_miss: called with each miss of the model from now on.
    """
    model, ledger = result.model, result.ledger
    ledger.notices.on_miss = on_miss
    ledger.reset_counters()
    if not ledger.guarded:
        ledger.graphs.enabled = False
        ledger.graphs.clear()
    stats = ledger.stats = conversion_stats(result)
    ledger.begin(stats["check_weights"])
    for captured in result.captures.every():
        store_graph(captured.region)
        captured.region.release_graph()
    if not ledger.guarded:
        separate(model.parameters())
        leave_as_it_is(model, stats, on_miss)
    elif result.config.training:
        install_training(model, ledger, CompiledForward(result.config.cuda_graphs is not False))
    if stats["total_replaced"] == 0:
        replayed = "; its calls are replayed from CUDA graphs" if stats["replays_unfused"] else ""
        warnings.warn(
            f"kfconvert fused nothing in {stats['model']}: {stats['nothing_fused']}{replayed}",
            stacklevel=level_outside(),
        )
    return stats
