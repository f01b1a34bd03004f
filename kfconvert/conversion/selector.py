"""Selects the sites to fuse, and how: each candidate is checked against float64, and timed on this device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..accuracy import ERROR_RATIO
from ..graph import aten
from ..matching import Site
from ..profiling import Comparison, compare_timings
from ..region import LiveTensors, Region
from ..runtime import Pool, Program, Recording, Unrecordable
from ..torch_state import without_autocast
from .cold_weights import are_cold, calls_beyond_cache
from .effort import EFFORTS, Effort
from .remembered import Remembered
from .samples import Sample, sample_inputs
from .trials import Together, Trials, accurate, described, flat, set_layout, timed_error
from .workloads import Load

Calls = Mapping[str, Callable[[], Any]]
# One call of each candidate, or several calls in turns.
Turns = Mapping[str, Sequence[Callable[[], Any]]]

# A candidate for several operators may take up to this multiple of the original's time; a candidate for a single
# operator must be faster by this factor. Medians within this factor count as equal here.
SAME_TIME = 1.02
SECONDS_PER_CANDIDATE = 0.01
# Timing ends after this many rounds and this share of its time budget, if they clearly show whether the original is
# slower.
LEAST_ROUNDS = 3
ENOUGH = 0.25
# On CUDA, this many calls are launched between two synchronizations: the time of a call is then the larger of device
# time and launch time on the host, without the latency of the synchronization.
CALLS_IN_FLIGHT = 10
SECONDS_PER_LAYOUT = 0.2
SECONDS_PER_CALL_FORM = 0.3


@dataclass(frozen=True)
class Decision:
    """The result for one kind of site. ``strategy`` is None if no candidate may be applied."""

    strategy: str | None
    reason: str | None
    original_us: float | None = None
    fused_us: float | None = None
    error_ratio: float | None = None

    @classmethod
    def of(cls, site: Site) -> Decision:
        return cls(site.strategy, site.reason, site.original_us, site.fused_us, site.error_ratio)

    def apply_to(self, site: Site) -> None:
        site.original_us, site.fused_us, site.error_ratio = self.original_us, self.fused_us, self.error_ratio
        module: Any = site.replacement.module
        site.strategy = module.strategy = self.strategy
        if self.strategy is None:
            site.reject(self.reason)  # type: ignore[arg-type]  # a site without a strategy has a reason
        else:
            site.status, site.reason = "applied", None


class Selector:
    """Caches its decision for each kind of site (pattern, module, its tensors, shapes, dtypes, layouts).

    Timings come from earlier conversions if ``remembered`` has them; accuracy depends on the weights, and is measured
    each time.

    Args:
        accuracy_threshold: relative error that always passes.
        timed: measure candidates, and reject those without a speedup; otherwise take the first accurate strategy.
        replayed: CUDA graphs will replay the programs, so launch time on the host does not count, but whether weights
            are in the cache does.
        effort: the time limits.
    """

    def __init__(
        self,
        device: torch.device,
        accuracy_threshold: float,
        timed: bool,
        replayed: bool = False,
        effort: Effort = EFFORTS["full"],
    ):
        self.device, self.accuracy_threshold, self.timed = device, accuracy_threshold, timed
        self.replayed, self.effort = replayed, effort
        self._seconds = 0.0  # spent on measurements
        self.remembered = Remembered(device)
        self._pool = Pool(device) if replayed and timed else None
        self._decisions: dict[tuple[Any, bool], Decision] = {}  # by the kind of a site and the layout
        self._kinds: dict[int, Any] = {}  # by the id of a site

    def measure(
        self, region: Region, sites: list[Site], live: LiveTensors, loads: Sequence[Load], layouts: Sequence[bool]
    ) -> None:
        """Find the best strategy for each site of ``region``, for all ``loads`` together, in each of the ``layouts``:
        in layout True, convolutions receive and return channels-last images."""
        if all((self._kinds.get(id(site)), layout) in self._decisions for site in sites for layout in layouts):
            return
        cold = self._pool is not None and are_cold(region, live, self.device)
        samples: dict[Any, Sample] = {}
        shares: dict[int, Counter[Any]] = {id(site): Counter() for site in sites}
        for load in loads:
            kinds, recorded = sample_inputs(region, sites, live, load.leaves)
            samples = recorded | samples
            for site in sites:
                shares[id(site)][kinds[id(site)]] += load.share  # type: ignore[assignment]  # counts may be fractions
        self._kinds |= {site: tuple(found.items()) for site, found in shares.items()}
        for kind in dict.fromkeys(self._kinds[id(site)] for site in sites):
            new = [layout for layout in layouts if (kind, layout) not in self._decisions]
            if self._seconds > self.effort.selection:
                reason = f"skipped: effort={self.effort.name!r} ends the selection after {self.effort.selection:g} s"
                self._decisions |= {(kind, layout): Decision(None, reason) for layout in new}
            elif new:
                start = time.perf_counter()
                together = [(samples[each], share) for each, share in kind]
                has_layouts = any(sample.has_layouts for sample, _ in together)
                decisions = self._decide(together, new if has_layouts else new[:1], cold)
                self._decisions |= {(kind, layout): decisions.get(layout, decisions[new[0]]) for layout in new}
                self._seconds += time.perf_counter() - start

    def apply(self, sites: list[Site], channels_last: bool) -> None:
        """Set status, reason and strategy of ``sites``, which were measured in this layout."""
        for site in sites:
            set_layout(site.replacement.module, channels_last)
            self._decisions[self._kinds[id(site)], channels_last].apply_to(site)

    def faster_layout(self, programs: dict[bool, Program], loads: Sequence[Load]) -> bool:
        """Whether the program with channels-last convolutions (True) is faster for all ``loads`` together; both
        programs have run with these inputs."""
        total = {layout: 0.0 for layout in programs}
        for load in loads:
            calls = {str(layout): partial(program.run, load.leaves) for layout, program in programs.items()}
            times = self._program_us(self._alone_on_the_device(calls))
            total = {layout: before + load.share * times[str(layout)] for layout, before in total.items()}
        return total[True] < total[False]

    def replayed_us(self, calls: Calls) -> dict[str, float]:
        """Returns the times in microseconds of those ``calls`` that can be recorded, empty if there are not two. All
        have run before."""
        recorded: dict[str, Callable[[], Any]] = {}
        for name, call in calls.items():
            alone = self._alone_on_the_device({name: call})
            if alone[name] is not call:
                recorded |= alone
        return self._program_us(recorded) if len(recorded) > 1 else {}

    def _program_us(self, calls: Calls) -> dict[str, float]:
        times = self._compare(calls, SECONDS_PER_LAYOUT * len(calls) * self.effort.timing)
        return {name: 1e3 * timing.median_ms for name, timing in times.items()}

    def slower(self, pairs: Sequence[tuple[Callable[[], Any], Callable[[], Any], float]]) -> str | None:
        """Returns None if the converted calls, launched by the host, are faster, else the times.

        ``pairs``: original and converted calls, each pair with its share of all calls.
        """
        total = {"original": 0.0, "converted": 0.0}
        for original, converted, share in pairs:
            medians = self._medians({"original": [original], "converted": [converted]})
            total = {name: time + share * medians[name] for name, time in total.items()}
        if total["converted"] < total["original"]:
            return None
        return f"it takes {total['converted']:.1f} us, the original {total['original']:.1f} us"

    def slower_beyond_doubt(self, original: Callable[[], Any], converted: Callable[[], Any]) -> str | None:
        """Returns None if the converted call may be as fast as the original, else the ratio of their times."""
        budget = SECONDS_PER_CALL_FORM * self.effort.timing
        return self._compare({"original": original, "converted": converted}, budget).speedup("converted").slower()

    @torch.no_grad()
    @without_autocast()
    def _decide(
        self, samples: list[tuple[Sample, float]], layouts: Sequence[bool], cold: bool = False
    ) -> dict[bool, Decision]:
        """Returns the decision for each of the ``layouts``; all share one original. Each of the ``samples`` has its
        share of the calls, whose weights are in memory (``cold``) or in the cache."""
        trials: dict[bool, list[Trials]] = {layout: [] for layout in layouts}
        for sample, _ in samples:
            exact = flat(sample.exact())
            own, seconds = timed_error(sample.original, exact)
            # The errors are root-mean-square errors. The user's threshold and one rounding unit are always allowed,
            # because the original may be exact by chance.
            tolerance = sample.site.match.pattern.tolerance
            allowed = max(ERROR_RATIO * own, self.accuracy_threshold, torch.finfo(sample.dtype).eps, tolerance)
            calls = calls_beyond_cache(sample, self.device) if cold else 1
            for layout in layouts:
                given = (sample, layout, exact, allowed, own, seconds, calls, self.effort.generates_kernels)
                trials[layout].append(Trials(*given))
        if self.timed:
            wanted = {layout: self._to_time(tried) for layout, tried in trials.items()}
            for index in range(len(samples)):
                self._time({layout: trials[layout][index] for layout in layouts}, wanted)
        operators = sum(node.target is not aten.t.default for node in samples[0][0].site.match.nodes)
        shares = [share for _, share in samples]
        return {layout: self._decision(Together(tried, shares), operators) for layout, tried in trials.items()}

    def _to_time(self, tried: list[Trials]) -> list[str]:
        """Returns the strategies of one layout that need timings: those that are promising for any sample. Sets the
        cached timings of each sample."""
        exact_enough = accurate(tried)
        promising: set[str] = set()
        for each in tried:
            each.medians = self._known(described(each), each.candidates) or {} if each.sample.is_remembered else {}
            promising |= each.medians.keys() or set(each.promising())
        return [name for name in exact_enough if name in promising] or exact_enough

    def _time(self, tried: dict[bool, Trials], wanted: dict[bool, list[str]]) -> None:
        """Time the original, and the wanted strategies of each layout, for one sample in the same rounds, unless the
        timings are cached."""
        calls: dict[str, Sequence[Callable[[], Any]]] = {}
        labels = {}
        for layout, each in tried.items():
            if wanted[layout] and not each.medians.keys() >= set(wanted[layout]):
                calls["original"] = each.original_calls()
                names = {f"{name}, {layout}": name for name in wanted[layout]}
                calls |= {label: each.calls(name) for label, name in names.items()}
                labels[layout] = {"original": "original", **names}
        if calls:
            medians = self._medians(calls, self._alone_on_the_device)
            for layout, names in labels.items():
                each = tried[layout]
                each.medians = {name: medians[label] for label, name in names.items()}
                if each.sample.is_remembered:
                    self.remembered.note(
                        f"{self._way(self.effort.name)}; {described(each)}", each.candidates, each.medians
                    )

    def _known(self, what: str, candidates: list[str]) -> dict[str, float] | None:
        """Returns the cached timings of ``what`` if they were measured with the current or full effort."""
        for effort in dict.fromkeys(("full", self.effort.name)):
            times = self.remembered.times(f"{self._way(effort)}; {what}", candidates)
            if times is not None:
                return times
        return None

    def _way(self, effort: str) -> str:
        return f"{'replayed' if self._pool else 'launched'}, {effort}"

    def _decision(self, tried: Together, operators: int) -> Decision:
        if not tried.plans:
            return Decision(None, tried.refusal)
        if not self.timed:
            return Decision(tried.plans[0], None, error_ratio=tried.error_ratio(tried.plans[0]))
        medians = tried.medians()
        ratios = {name: tried.error_ratio(name) for name in medians if name != "original"}
        return self._fastest(operators, medians, ratios)

    def _fastest(self, operators: int, medians: dict[str, float], ratios: dict[str, float]) -> Decision:
        """Returns the fastest strategy for a site of ``operators`` operators, unless the original is faster; among
        strategies of equal time, the most accurate.

        Args:
            medians: the time of "original" and of each strategy, in microseconds.
            ratios: the error of each strategy over the original's error.
        """
        before = medians["original"]
        fastest = min(ratios, key=medians.__getitem__)
        limit = before * SAME_TIME if operators > 1 else before / SAME_TIME
        if medians[fastest] > limit:
            much = "" if medians[fastest] > before else f"{100 * (SAME_TIME - 1):.0f} % "
            reason = f"not {much}faster: {fastest} takes {medians[fastest]:.1f} us, the original {before:.1f} us"
            return Decision(None, reason, before, medians[fastest])
        as_fast = [name for name in ratios if medians[name] <= min(medians[fastest] * SAME_TIME, limit)]
        best = min(as_fast, key=ratios.__getitem__)
        return Decision(best, None, before, medians[best], ratios[best])

    def _alone_on_the_device(self, candidates: Calls) -> Calls:
        """Returns recordings of the candidates if programs will be replayed, and all candidates can be recorded."""
        pool = self._pool
        if pool is None:
            return candidates
        try:
            recordings = {
                name: Recording(partial(_without_outputs, call), [], [], pool) for name, call in candidates.items()
            }
        except (Unrecordable, torch.OutOfMemoryError):
            return candidates
        return {name: partial(recording.replay, []) for name, recording in recordings.items()}

    def _medians(self, turns: Turns, prepared: Callable[[Calls], Calls] = dict) -> dict[str, float]:
        """Returns the time of one call of each candidate in microseconds; ``prepared`` creates the timed calls from
        several calls in a row."""
        most = max(map(len, turns.values()))
        rounds = max(1, CALLS_IN_FLIGHT // most) if self.device.type == "cuda" else 1
        repeated = {name: partial(_repeat, calls, rounds) for name, calls in turns.items()}
        times = self._compare(prepared(repeated), SECONDS_PER_CANDIDATE * len(turns) * self.effort.timing)
        return {name: 1e3 * timing.median_ms / (rounds * len(turns[name])) for name, timing in times.items()}

    def _compare(self, candidates: Mapping[str, Callable[[], Any]], budget_s: float) -> Comparison:
        """Compares the times of the first candidate and of the others, all of which have run before."""

        def decided(samples: Mapping[str, list[float]]) -> bool:
            spent_ms = sum(map(sum, samples.values()))
            return spent_ms >= 1e3 * budget_s * ENOUGH and _is_clear(samples)

        return compare_timings(
            candidates, self.device, budget_s=budget_s, min_rounds=LEAST_ROUNDS, settled=True, decided=decided
        )


def _is_clear(samples: Mapping[str, list[float]]) -> bool:
    """Whether the first candidate's fastest round was slower than all rounds of another, or its slowest round faster
    than all rounds of all others.

    The others are not ranked: candidates that differ too little for these few rounds are equally good.
    """
    first, *others = samples.values()
    return min(map(max, others)) < min(first) or max(first) < min(map(min, others))


def _without_outputs(call: Callable[[], Any], inputs: list[Any]) -> tuple[()]:
    call()
    return ()


def _repeat(calls: Sequence[Callable[[], Any]], times: int) -> None:
    for _ in range(times):
        for call in calls:
            call()
