"""Wall-clock timings of callables that are to be compared with each other.

The candidates take turns, so that a change of clock frequency or of load meets all of them alike, and the
device is synchronised around every single call. A ratio is formed within each turn; whether it differs from 1
is decided by a distribution-free confidence interval of its median.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Ratios nearer to 1 than this are not called a difference, however many rounds agree: placement of memory and
# code shifts the time of one and the same program by about as much.
NOISE_FLOOR = 0.01
# Warm-up ends when the last three calls lie within this factor of each other ...
STABLE_WITHIN = 1.1
# ... or, if they never do, after so many calls or this share of the budget.
WARM_UP_CALLS = 30
WARM_UP_SHARE = 0.25
MAX_ROUNDS = 1000
# How many times tell the distribution of those of all rounds.
QUANTILES = 41


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of one call in milliseconds: median, first and third quartile over `rounds` calls."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def summary(self) -> str:
        return f"{self.median_ms:.3f} ms ({self.q1_ms:.3f} to {self.q3_ms:.3f}, {self.rounds} rounds)"


@dataclasses.dataclass(frozen=True)
class Speedup:
    """How many times faster a candidate is than the baseline: median of the ratios within each round.

    `q1` and `q3` are the quartiles of those ratios, `low` and `high` bound their median with at least 95 %
    confidence (less than that below 6 rounds). `measurable` is False when the difference is inside the noise.
    """

    ratio: float
    q1: float
    q3: float
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        return self.low > 1 + NOISE_FLOOR or self.high < 1 / (1 + NOISE_FLOOR)

    def slower(self) -> str | None:
        """How much slower the candidate is, where that is beyond doubt; else None."""
        return self._slower() if self.high < 1 else None

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "measurable": self.measurable}

    def summary(self) -> str:
        if not self.measurable:
            return f"no measurable difference (x {self.ratio:.2f}, {self._interval()})"
        return self._slower() if self.ratio < 1 else f"{self.ratio:.2f} x faster ({self._interval()})"

    def _slower(self) -> str:
        return f"{1 / self.ratio:.2f} x slower (x {self.ratio:.2f}, {self._interval()})"

    def _interval(self) -> str:
        return f"95 % between {self.low:.2f} and {self.high:.2f}"


class Comparison(Mapping[str, Timing]):
    """Timings by candidate name; the first candidate is the baseline of the speed-ups."""

    def __init__(self, samples_ms: Mapping[str, list[float]]):
        """samples_ms: the times of each candidate in milliseconds, one a round, in the order of the rounds."""
        self._samples = {name: list(times) for name, times in samples_ms.items()}
        self._timings = {name: _timing(times) for name, times in self._samples.items()}
        self.baseline = next(iter(self._samples))

    def __getitem__(self, name: str) -> Timing:
        return self._timings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._timings)

    def __len__(self) -> int:
        return len(self._timings)

    def renamed(self, names: Mapping[str, str]) -> "Comparison":
        """The same timings, those of the candidates in ``names`` under other names."""
        return Comparison({names.get(name, name): times for name, times in self._samples.items()})

    def of_one_call(self, calls: int) -> "Comparison":
        """The times of one call each, where these are of so many calls in a row."""
        return Comparison({name: [time / calls for time in times] for name, times in self._samples.items()})

    def speedup(self, name: str, baseline: str | None = None) -> Speedup:
        """Speed-up of a candidate over `baseline` (the first candidate unless named)."""
        return _speedup(self._samples[baseline or self.baseline], self._samples[name])

    def as_dict(self) -> dict[str, Any]:
        """{"baseline", "timings": {name: ...}, "speedups": {name: ...}}, ready for JSON. A timing has ``quantiles_ms``
        as well: of however many rounds, QUANTILES times from the shortest to the longest, equally many rounds apart."""
        others = [name for name in self if name != self.baseline]
        quantiles = {name: _quantiles(times) for name, times in self._samples.items()}
        return {
            "baseline": self.baseline,
            "timings": {name: {**timing.as_dict(), "quantiles_ms": quantiles[name]} for name, timing in self.items()},
            "speedups": {name: self.speedup(name).as_dict() for name in others},
        }

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.baseline} {self[self.baseline].median_ms:.3f} ms"]
        for name, timing in self.items():
            if name != self.baseline:
                parts.append(f"{name} {timing.median_ms:.3f} ms, {self.speedup(name).summary()}")
        return "; ".join(parts)


def compare_timings(
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device | str = "cpu",
    budget_s: float = 2.0,
    min_rounds: int = 7,
    settled: bool = False,
    decided: Callable[[Mapping[str, list[float]]], bool] | None = None,
) -> Comparison:
    """Time callables of no arguments against each other, without gradients.

    device: where they run; it is synchronised before and after each call.
    budget_s: seconds to spend on all candidates together, warm-up included. The first call of each (which may
    compile something) does not count, and `min_rounds` rounds are made even if that takes longer.
    settled: they were called before and need no warm-up.
    decided: after `min_rounds`, asked with the milliseconds so far of each candidate whether that is enough.
    """
    if not candidates:
        raise ValueError("compare_timings needs at least one candidate")
    if min_rounds < 1:
        raise ValueError(f"min_rounds must be at least 1, got {min_rounds}")
    synchronize = synchronizer(torch.device(device))
    calls = list(candidates.items())
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with torch.no_grad():
        start = time.perf_counter()
        for _, call in calls if not settled else ():
            start += _warm_up(call, synchronize, WARM_UP_SHARE * budget_s / len(calls))
        rounds = 0
        while rounds < min_rounds or (rounds < MAX_ROUNDS and time.perf_counter() - start < budget_s):
            if decided is not None and rounds >= min_rounds and decided(samples):
                break
            # every second round runs backwards: each candidate follows each neighbour equally often
            for name, call in calls if rounds % 2 == 0 else reversed(calls):
                samples[name].append(1e3 * seconds(call, synchronize))
            rounds += 1
    return Comparison(samples)


def benchmark_callable(
    call: Callable[[], Any], device: torch.device | str = "cpu", budget_s: float = 2.0, min_rounds: int = 7
) -> Timing:
    """Time one callable of no arguments, as `compare_timings` does."""
    return compare_timings({"call": call}, device, budget_s, min_rounds)["call"]


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits until everything launched on `device` is done."""
    if device.type in ("cpu", "meta"):
        return lambda: None
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: torch.accelerator.synchronize(device)


def seconds(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Wall-clock time of one call, from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    end = time.perf_counter()
    del result  # freed outside the measured time, and before the next call needs the memory
    return end - start


def _warm_up(call: Callable[[], Any], synchronize: Callable[[], None], limit_s: float) -> float:
    """Call until the times settle; returns the seconds of the first call, which no budget includes."""
    first = seconds(call, synchronize)
    times: list[float] = []
    while len(times) < WARM_UP_CALLS and sum(times) < limit_s:
        times.append(seconds(call, synchronize))
        if len(times) >= 3 and max(times[-3:]) <= STABLE_WITHIN * min(times[-3:]):
            break
    return first


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median with at least 95 % confidence from 6 values on, whatever their distribution is.

    They are order statistics: the number of independent values below the median is binomial(n, 1/2), here by
    its normal approximation with continuity correction (1.96 standard deviations of sqrt(n)/2); see J.-Y. Le
    Boudec, Performance Evaluation of Computer and Communication Systems (2010), chapter 2.
    """
    rank = max(0, math.floor((len(ordered) - 1) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[rank], ordered[-1 - rank]


def _timing(times: list[float]) -> Timing:
    q1, median, q3 = _quartiles(times)
    return Timing(median, q1, q3, len(times))


def _speedup(baseline: list[float], candidate: list[float]) -> Speedup:
    ratios = sorted(base / own for base, own in zip(baseline, candidate, strict=True))
    q1, median, q3 = _quartiles(ratios)
    return Speedup(median, q1, q3, *median_interval(ratios))


def _quantiles(values: list[float]) -> list[float]:
    """QUANTILES of ``values``, to the nanosecond where these are milliseconds."""
    if len(values) == 1:
        return [round(values[0], 6)] * QUANTILES
    inner = statistics.quantiles(values, n=QUANTILES - 1, method="inclusive")
    return [round(value, 6) for value in (min(values), *inner, max(values))]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3
