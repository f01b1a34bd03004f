"""The last steps of a conversion: installation of the programs, timing, and statistics."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accuracy import ValidationResult
from ..capture import prompt_of
from ..generation import install_generate
from ..hub import install_save_pretrained
from ..inputs import ExampleCall
from ..process import level_outside
from ..profiling import Comparison, compare_timings
from ..region import keep
from ..runtime import (
    CALLS_BEFORE,
    Codes,
    CudaGraphs,
    Ledger,
    MissCallback,
    MissNotices,
    OnMiss,
    Variant,
    can_record,
    install,
    merge,
    separate,
    uninstall,
)
from .captures import Captures
from .config import ConversionConfig
from .generation_timing import GenerationTimings, time_generation
from .preparation import ConversionError, Prepared
from .stages import Stages
from .statistics import ConversionStats, conversion_stats

if TYPE_CHECKING:
    from .serving import Served

# Seconds for timing the original and the converted model together.
SECONDS_PER_MODEL = 1.0
LEAST_ROUNDS = 3
# A timing in which the converted model seems slower, without significance, is repeated for this many times as long.
LONGER = 4.0
# A program without fusions serves calls only if its recordings make them faster by this factor.
LEAST_GAIN = 1.02
# The names, among the timings, of the converted model in the setting that is not delivered.
WITH_GRAPHS, WITHOUT_GRAPHS = "with CUDA graphs", "without CUDA graphs"

# The number of calls between checks for untraceable writes to weights. On CUDA, each check reads all weights, and the
# host waits for it.
CHECK_WEIGHTS = {"cpu": 100}


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished conversion: the model with its programs (in ``ledger``), and the results of the steps."""

    model: nn.Module
    device: torch.device
    call: ExampleCall
    config: ConversionConfig
    captures: Captures
    ledger: Ledger
    seconds: dict[str, float]
    asked: frozenset[str]
    not_written: frozenset[str]
    check_weights: int
    accuracy: ValidationResult | None = None
    timings: Timings | None = None
    reverted: str | None = None
    memory: dict[str, Any] | None = None
    remembered: int = 0
    tuned: Sequence[tuple[ExampleCall, float]] = ()
    time_shares: dict[str, Any] | None = None
    served: Served | None = None


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


def replace(
    model: nn.Module,
    variants: dict[str, list[Variant]],
    graphs: CudaGraphs,
    codes: Codes | None = None,
) -> Ledger:
    """Replace forwards, and previous programs, by these programs; ``graphs`` and ``codes`` as in ``install``."""
    uninstall(model)
    ledger = install(model, variants, graphs, codes)
    ledger.generate = install_generate(model)
    install_save_pretrained(model)
    ledger.notices.silent = True  # until delivery: misses in a conversion are irrelevant
    return ledger


def merge_weights(model: nn.Module, variants: dict[str, list[Variant]]) -> list[Tensor]:
    """If the programs of ``model`` read several parameters as one tensor, make these contiguous in memory, so that no
    program keeps a copy. A parameter is in one such tensor; any further tensor gets a copy of it. Returns the previous
    memory of the parameters, see ``runtime.merge``."""
    parameters, moved, before = set(map(id, model.parameters())), set[int](), list[Tensor]()
    programs = [variant.program for found in variants.values() for variant in found]
    for program in programs:
        program.clear()  # frees its references to the weights
    for weights in (weights for program in programs for weights in program.merged_weights()):
        ids = set(map(id, weights))
        if ids <= parameters and ids.isdisjoint(moved) and (old := merge(weights)) is not None:
            moved |= ids
            before += old
    return before


@dataclass(frozen=True)
class Timings:
    """Times of the original and the converted model: for the ``example`` call, each ``tuned`` call with its weight,
    ``generate`` from the example's prompt, and the example calls of other ``methods``."""

    example: Comparison
    tuned: list[tuple[ExampleCall, float, Comparison]]
    generation: GenerationTimings | None = None
    methods: list[tuple[ExampleCall, Comparison]] = field(default_factory=list)

    def slower(self) -> str | None:
        """Returns the slowdown of the converted model as a whole if it is beyond doubt; else None."""
        if not self.tuned:
            return self.example.speedup("converted").slower()
        before = sum(weight * timings["original"].median_ms for _, weight, timings in self.tuned)
        # At the upper bounds of the speedups.
        after = sum(
            weight * timings["original"].median_ms / timings.speedup("converted").high
            for _, weight, timings in self.tuned
        )
        if after <= before:
            return None
        lines = [f"{call.summary()}: {timings.speedup('converted').summary()}" for call, _, timings in self.tuned]
        return "; ".join(lines)

    def faster(self, least: float) -> bool:
        """Whether the converted model is faster by the factor ``least`` beyond doubt, in calls or in ``generate``."""
        calls = [(weight, timings) for _, weight, timings in self.tuned] or [(1.0, self.example)]
        before = sum(weight * timings["original"].median_ms for weight, timings in calls)
        # At the lower bounds of the speedups.
        after = sum(
            weight * timings["original"].median_ms / timings.speedup("converted").low for weight, timings in calls
        )
        generates = self.generation is not None and self.generation.timings.speedup("converted").low >= least
        return generates or before >= least * after


def time(
    prepared: Prepared,
    captures: Captures,
    ledger: Ledger,
    cuda_graphs: bool | None,
    stages: Stages,
    share: float = 1.0,
    new_tokens: int | None = None,
) -> Timings | None:
    """Times the original and the converted model; None if no program serves the example call.

    Args:
        share: share of the usual time for this measurement.
        new_tokens: as in ``ConversionConfig``.
        cuda_graphs: whether the converted model records CUDA graphs; None to record if that is faster. The decision is
            set in ``ledger.graphs``; if both were measured, the timings include the other one.
    """
    graphs = ledger.graphs
    graphs.enabled = cuda_graphs is not False and can_record(prepared.device)
    if not _serves_example(captures, ledger):
        return None
    generates = prompt_of(prepared.model, prepared.call) is not None
    with stages.stage("time", 1 + len(prepared.tuned) + len(prepared.methods) + generates) as advance:
        calls = [prepared.call, *(call for call, _ in (*prepared.tuned, *prepared.methods))]
        seconds = SECONDS_PER_MODEL * share
        budgets = [seconds] + [seconds / len(calls)] * (len(calls) - 1)
        found = []
        for call, budget in zip(calls, budgets):
            timings = _timed(prepared, call, graphs, budget)
            speedup = timings.speedup("converted")
            if speedup.ratio < 1 and not speedup.slower():
                timings = _timed(prepared, call, graphs, LONGER * budget)
            found.append(timings)
            advance()
        weights = [weight for _, weight in prepared.tuned]
        decisive = list(zip(found[1 : 1 + len(weights)], weights)) or [(found[0], 1.0)]
        if cuda_graphs is None and _are_faster_launched(decisive):
            graphs.enabled = False
            graphs.clear()
            names = {"converted": WITH_GRAPHS, WITHOUT_GRAPHS: "converted"}
            found = [timings.renamed(names) if WITHOUT_GRAPHS in timings else timings for timings in found]
        generation = None
        if generates:
            with graphs.for_now():
                generation = time_generation(prepared, new_tokens, seconds)
            advance()
    tuned = [(call, weight, timings) for (call, weight), timings in zip(prepared.tuned, found[1:])]
    methods = [(call, timings) for (call, _), timings in zip(prepared.methods, found[1 + len(tuned) :])]
    return Timings(found[0], tuned, generation, methods)


def _serves_example(captures: Captures, ledger: Ledger) -> bool:
    """Whether a program of the whole model, or of a part, serves the example call."""
    whole = ledger.guarded.get("")
    if captures.forms and whole is not None:
        return any(variant.region is captures.forms[0].region for variant in whole.variants)
    return bool(ledger.guarded)


def without_gain(captures: Captures, ledger: Ledger, timings: Timings | None) -> bool:
    """Whether there are programs without fusions, and their recordings do not make calls faster. Only the example's
    call form is timed, if nothing is fused in it."""
    variants = chain.from_iterable(guarded.variants for guarded in ledger.guarded.values())
    if all(variant.program.fused for variant in variants):
        return False
    is_timed = bool(captures.forms) and not captures.forms[0].applied
    gains = timings is not None and timings.faster(LEAST_GAIN) if is_timed else True
    return not (ledger.graphs.enabled and gains)


def _timed(prepared: Prepared, call: ExampleCall, graphs: CudaGraphs, budget: float) -> Comparison:
    """Times both models for one call, and the converted model also without CUDA graphs if it records some."""
    own = call.copied()

    def converted() -> Any:
        return own(prepared.model)

    def launched() -> Any:
        graphs.enabled = False
        try:
            return converted()
        finally:
            graphs.enabled = True

    candidates: dict[str, Callable[[], Any]] = {"original": partial(prepared.run_original, own), "converted": converted}
    if graphs.enabled and _is_recorded(converted, graphs):
        candidates[WITHOUT_GRAPHS] = launched
    return compare_timings(candidates, prepared.device, budget_s=budget, min_rounds=LEAST_ROUNDS, settled=True)


def _are_faster_launched(found: list[tuple[Comparison, float]]) -> bool:
    """Whether the converted model takes less time without CUDA graphs, for all weighted calls together that record
    any."""
    both = [(timings, weight) for timings, weight in found if WITHOUT_GRAPHS in timings]
    replayed = sum(weight * timings["converted"].median_ms for timings, weight in both)
    return replayed > sum(weight * timings[WITHOUT_GRAPHS].median_ms for timings, weight in both)


def _is_recorded(call: Callable[[], Any], graphs: CudaGraphs) -> bool:
    """Whether ``call``, repeated often enough, is replayed from a recording."""
    with torch.no_grad():
        for _ in range(CALLS_BEFORE + 1):
            before = graphs.replays
            call()
    return graphs.replays > before


def calls_between_checks(wanted: int | None, device: torch.device) -> int:
    """Returns the number of calls between checks of the weights; 0 for never."""
    return CHECK_WEIGHTS.get(device.type, 0) if wanted is None else wanted


def check_callback(on_miss: Any) -> None:
    """Raises ConversionError unless ``on_miss`` is None or callable."""
    if on_miss is not None and not callable(on_miss):
        raise ConversionError(f"on_miss must be a function of a reason, not {on_miss!r}"[:300])


def leave_as_it_is(model: nn.Module, stats: dict[str, Any]) -> None:
    """Give ``model``, which has no programs, the other attributes of a converted model."""
    ledger = Ledger(ConversionStats(stats), MissNotices(model), CudaGraphs(type(model).__name__))
    model.__dict__["kfconvert_info"], model.__dict__["kfconvert_refresh"] = ledger.info, ledger.refresh
    install_save_pretrained(model)


def hand_over(result: Result, on_miss: OnMiss | None = None) -> dict[str, Any]:
    """Returns the statistics, which the converted model has as well; warns if nothing was fused.

    Args:
        on_miss: called with each miss of the model from now on.
    """
    model, ledger = result.model, result.ledger
    ledger.notices.on_miss = MissCallback(on_miss, ledger.notices.model_name)
    ledger.reset_counters()
    if not ledger.guarded:
        ledger.graphs.enabled = False
        ledger.graphs.clear()
    stats = ledger.stats = conversion_stats(result)
    ledger.begin(stats["check_weights"])
    for captured in result.captures.every():
        keep(captured.region)
        captured.region.release_graph()
    if not ledger.guarded:
        separate(model.parameters())
        leave_as_it_is(model, stats)
    if stats["total_replaced"] == 0:
        replayed = "; its calls are replayed from CUDA graphs" if stats["replays_unfused"] else ""
        warnings.warn(
            f"kfconvert fused nothing in {stats['model']}: {stats['nothing_fused']}{replayed}",
            stacklevel=level_outside(),
        )
    return stats
