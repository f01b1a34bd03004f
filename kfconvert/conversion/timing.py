"""Timing of the original and the converted model, and the decisions that depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..capture import prompt_of
from ..inputs import ExampleCall
from ..profiling import Comparison, compare_timings
from ..runtime import CALLS_BEFORE, CudaGraphs, Ledger
from .captures import Captures
from .config import ConversionConfig
from .generation_timing import GenerationTimings, time_generation
from .preparation import Prepared
from .stages import Stages

# Seconds for timing the original and the converted model together.
SECONDS_PER_MODEL = 1.0
LEAST_ROUNDS = 3
# A timing in which the converted model seems slower, without significance, is repeated for this many times as long.
LONGER = 4.0
# A program without fusions serves calls only if its recordings make them faster by this factor.
LEAST_GAIN = 1.02
# The names, among the timings, of the converted model in the setting that is not delivered.
WITH_GRAPHS, WITHOUT_GRAPHS = "with CUDA graphs", "without CUDA graphs"


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
        before, after = self._totals("high")
        if after <= before:
            return None
        lines = [f"{call.summary()}: {timings.speedup('converted').summary()}" for call, _, timings in self.tuned]
        return "; ".join(lines)

    def faster(self, least: float) -> bool:
        """Whether the converted model is faster by the factor ``least`` beyond doubt, in calls or in ``generate``."""
        before, after = self._totals("low")
        generates = self.generation is not None and self.generation.timings.speedup("converted").low >= least
        return generates or before >= least * after

    def _totals(self, bound: str) -> tuple[float, float]:
        """Returns the weighted times of the original, and of the converted model at this bound of its speedups."""
        calls = [(weight, timings) for _, weight, timings in self.tuned] or [(1.0, self.example)]
        before = [weight * timings["original"].median_ms for weight, timings in calls]
        speedups = [getattr(timings.speedup("converted"), bound) for _, timings in calls]
        return sum(before), sum(time / speedup for time, speedup in zip(before, speedups))


def time(
    prepared: Prepared, captures: Captures, ledger: Ledger, config: ConversionConfig, stages: Stages, share: float
) -> Timings | None:
    """Times the original and the converted model; None if no program serves the example call.

    If ``config.cuda_graphs`` is "auto" and calls without CUDA graphs are faster, ``ledger.graphs`` is disabled, and the
    timings include both.

    Args:
        share: share of the usual time for this measurement.
    """
    graphs = ledger.graphs
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
        if config.cuda_graphs == "auto" and _are_faster_launched(decisive):
            graphs.enabled = False
            graphs.clear()
            names = {"converted": WITH_GRAPHS, WITHOUT_GRAPHS: "converted"}
            found = [timings.renamed(names) if WITHOUT_GRAPHS in timings else timings for timings in found]
        generation = None
        if generates:
            with graphs.for_now():
                forward_ms = found[0]["original"].median_ms
                generation = time_generation(prepared, config.new_tokens, seconds, forward_ms)
            advance()
    tuned = [(call, weight, timings) for (call, weight), timings in zip(prepared.tuned, found[1:])]
    methods = [(call, timings) for (call, _), timings in zip(prepared.methods, found[1 + len(tuned) :])]
    return Timings(found[0], tuned, generation, methods)


def _serves_example(captures: Captures, ledger: Ledger) -> bool:
    """Whether a program of the whole model, or of a part, serves the example call."""
    whole = ledger.guarded.get("")
    if captures.example is not None and whole is not None:
        return any(variant.region is captures.example.region for variant in whole.variants)
    return any(path for path in ledger.guarded)


def without_gain(captures: Captures, ledger: Ledger, timings: Timings | None) -> bool:
    """Whether there are programs without fusions, and their recordings do not make calls faster. Only the example's
    call form is timed, if nothing is fused in it."""
    variants = chain.from_iterable(guarded.variants for guarded in ledger.guarded.values())
    if all(variant.program.fused for variant in variants):
        return False
    is_timed = captures.example is not None and not captures.example.applied
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


def reject_slower_methods(captures: Captures, timings: Timings) -> bool:
    """Reject the applied sites of parts that were captured for a slower method; returns whether there are any."""
    found = False
    for call, comparison in timings.methods:
        slower = comparison.speedup("converted").slower()
        for part in captures.parts if slower is not None else ():
            for captured in part.captures if part.method == call.method else ():
                for site in captured.applied:
                    site.reject(f"{call.method} is slower as a whole: {slower}")
                    found = True
    return found
