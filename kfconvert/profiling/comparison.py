"""Wall-clock comparison of callables.

The candidates take turns, so that changes of clock frequency or load affect all of them equally. The device is
synchronized around every call. A ratio is computed within each round, and a distribution-free confidence interval of
its median decides whether it differs from 1.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

# Ratios closer to 1 than this do not count as a difference, regardless of the number of rounds: memory and code
# placement change the time of one program by about as much.
NOISE_FLOOR = 0.01
# Warm-up ends when the last three times differ by at most this factor ...
STABLE_WITHIN = 1.1
# ... or after this number of calls or this share of the budget.
WARM_UP_CALLS = 30
WARM_UP_SHARE = 0.25
MAX_ROUNDS = 1000


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call in milliseconds: median, first and third quartile over `rounds` calls."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Speedup:
    """The speed-up of a candidate over the baseline: the median of the ratios within each round.

    `q1` and `q3` are the quartiles of the ratios. `low` and `high` bound the median with at least 95 % confidence
    (less below 6 rounds). `measurable` is False if the difference is within the noise.
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
        """Describes how much slower the candidate is, if that is statistically significant; else None."""
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
    """Timings by candidate name. The first candidate is the baseline of the speed-ups."""

    def __init__(self, samples_ms: Mapping[str, list[float]]):
        """samples_ms: the times of each candidate in milliseconds, one per round, in the order of the rounds."""
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
        return Comparison({names.get(name, name): times for name, times in self._samples.items()})

    def of_one_call(self, calls: int) -> "Comparison":
        """Returns the times per call of measurements of ``calls`` consecutive calls."""
        return Comparison({name: [time / calls for time in times] for name, times in self._samples.items()})

    def speedup(self, name: str, baseline: str | None = None) -> Speedup:
        """Returns the speed-up of a candidate over `baseline` (default: the first candidate)."""
        return _speedup(self._samples[baseline or self.baseline], self._samples[name])

    def as_dict(self) -> dict[str, Any]:
        """Returns {"baseline", "timings": {name: ...}, "speedups": {name: ...}}, ready for JSON."""
        others = [name for name in self if name != self.baseline]
        return {
            "baseline": self.baseline,
            "timings": {name: dataclasses.asdict(timing) for name, timing in self.items()},
            "speedups": {name: self.speedup(name).as_dict() for name in others},
        }


def compare_timings(
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device | str = "cpu",
    budget_s: float = 2.0,
    min_rounds: int = 7,
    settled: bool = False,
    decided: Callable[[Mapping[str, list[float]]], bool] | None = None,
) -> Comparison:
    """Compares the times of callables without arguments, without gradients.

    device: the device of the callables, which is synchronized before and after each call.
    budget_s: seconds for all candidates together, including warm-up. The first call of each (which may compile) does
    not count, and `min_rounds` rounds run even if they take longer.
    settled: whether the callables were called before and need no warm-up.
    decided: after `min_rounds` rounds, called with the milliseconds of each candidate; True ends the comparison.
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
            # Every second round runs backwards, so each candidate follows each neighbor equally often.
            for name, call in calls if rounds % 2 == 0 else reversed(calls):
                samples[name].append(1e3 * seconds(call, synchronize))
            rounds += 1
    return Comparison(samples)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for all work on `device`."""
    if device.type in ("cpu", "meta"):
        return lambda: None
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: torch.accelerator.synchronize(device)


def seconds(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Returns the wall-clock time of one call, from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    end = time.perf_counter()
    del result  # freed outside the measured time, and before the next call needs the memory
    return end - start


def _warm_up(call: Callable[[], Any], synchronize: Callable[[], None], limit_s: float) -> float:
    """Calls until the times are stable. Returns the seconds of the first call, which does not count for the budget."""
    first = seconds(call, synchronize)
    times: list[float] = []
    while len(times) < WARM_UP_CALLS and sum(times) < limit_s:
        times.append(seconds(call, synchronize))
        if len(times) >= 3 and max(times[-3:]) <= STABLE_WITHIN * min(times[-3:]):
            break
    return first


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Returns distribution-free bounds of the median with at least 95 % confidence (for at least 6 values).

    The bounds are order statistics. The number of independent values below the median is binomial(n, 1/2), here with
    its normal approximation and continuity correction (1.96 standard deviations of sqrt(n)/2). See J.-Y. Le Boudec,
    Performance Evaluation of Computer and Communication Systems (2010), chapter 2.
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


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3
