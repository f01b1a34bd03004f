"""Trials for one sample of a site: the strategies of its fused module, their errors, and the candidates to time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cold_weights import modules_with_own_weights, originals_with_own_weights
from .samples import Sample

# A strategy is not timed if its first call took longer than SLOW_SECONDS, and HOPELESS times as long as the fastest
# first call.
SLOW_SECONDS = 0.02
HOPELESS = 2.0


class Trials:
    """The fused strategies of a sample, each called once in one layout; ``plans`` has the sufficiently accurate
    strategies."""

    def __init__(
        self,
        sample: Sample,
        channels_last: bool,
        exact: list[Tensor],
        allowed: float,
        original_error: float,
        original_seconds: float,
        calls: int = 1,
        compiles: bool = True,
    ):
        self.sample, self.channels_last, self._calls = sample, channels_last, calls
        self._original_error, self._original_seconds = original_error, original_seconds
        self.plans: dict[str, Callable[[], Any]] = {}
        self.errors: dict[str, float] = {}
        self.medians: dict[str, float] = {}  # microseconds of "original" and of each strategy that was timed
        self._seconds: dict[str, float] = {}
        least, failed = math.inf, ""
        module: Any = sample.site.replacement.module
        set_layout(module, channels_last)
        inputs = sample.laid_out(channels_last)
        # The last strategy of every module is plain ATen, as in the original.
        for strategy in module.strategies(*inputs)[:-1]:
            if strategy == "triton" and not compiles:  # a kernel takes a second or two
                continue
            module.strategy = strategy
            try:
                plan = partial(module.plan(*inputs), *inputs)
                error, seconds = timed_error(plan, exact)
                if exact[0].is_cuda and seconds > SLOW_SECONDS:  # the driver loads a kernel in its first launch
                    error, seconds = timed_error(plan, exact)
            except RuntimeError as refusal:  # a library that does not support these shapes
                failed += f"; {strategy}: {refusal}".splitlines()[0]
                continue
            if error <= allowed:
                self.plans[strategy], self.errors[strategy], self._seconds[strategy] = plan, error, seconds
            least = min(least, error)
        self.refusal = ""
        if self.plans:
            return
        if math.isinf(least):
            self.refusal = f"no fused implementation for {sample.dtype} on this device{failed}"
        else:
            self.refusal = f"error {least:.1e} against float64, allowed {allowed:.1e}"
            noise = _error(flat(sample.exact_of_neighbours()), exact)
            if noise > allowed:
                self.refusal += f"; rounding its inputs alone gives {noise:.1e}"

    @property
    def candidates(self) -> list[str]:
        return ["original", *self.plans]

    @property
    def is_cold(self) -> bool:
        """Whether calls must read their weights from memory, not from the cache."""
        return self._calls > 1

    def original_calls(self) -> Sequence[Callable[[], Any]]:
        """Returns the call of the original; if weights must be cold, several calls with separate weights."""
        return _once(originals_with_own_weights(self.sample, self._calls)) if self.is_cold else [self.sample.original]

    def calls(self, strategy: str) -> Sequence[Callable[[], Any]]:
        """Like ``original_calls``, for the fused module."""
        if not self.is_cold:
            return [self.plans[strategy]]
        inputs, planned = self.sample.laid_out(self.channels_last), []
        for module in modules_with_own_weights(self.sample, self._calls):
            fused: Any = module
            set_layout(fused, self.channels_last)
            fused.strategy = strategy
            planned.append(partial(fused.plan(*inputs), *inputs))
        return _once(planned)

    def error_ratio(self, strategy: str) -> float:
        """Returns the error of a strategy over the error of the original."""
        return self.errors[strategy] / max(self._original_error, torch.finfo(torch.float64).eps)

    def promising(self) -> list[str]:
        """Returns the strategies to time, by the seconds of the first calls of each strategy and of the original."""
        if not self.plans:
            return []
        limit = max(HOPELESS * min(self._original_seconds, *self._seconds.values()), SLOW_SECONDS)
        names = [name for name, seconds in self._seconds.items() if seconds <= limit]
        return names or [min(self._seconds, key=self._seconds.__getitem__)]


def described(tried: Trials) -> str:
    """Describes the kind of site and, if it has images, their layout."""
    layout = ""
    if tried.sample.has_layouts:
        layout = f"channels last by {tried.sample.strides}; " if tried.channels_last else "contiguous; "
    return f"{'weights from memory; ' if tried.is_cold else ''}{layout}{tried.sample.description}"


def accurate(tried: Sequence[Trials]) -> list[str]:
    """Returns the strategies that are accurate enough for all samples."""
    return [name for name in tried[0].plans if all(name in each.plans for each in tried)]


class Together:
    """The trials of several samples in one layout, for one decision; ``plans`` are strategies valid for all of them."""

    def __init__(self, trials: list[Trials], shares: list[float]):
        self._trials, self._shares = trials, shares
        self.plans = accurate(trials)

    @property
    def refusal(self) -> str:
        reasons = (each.refusal for each in self._trials if not each.plans)
        return next(reasons, "no fused implementation supports all inputs of tune_for")

    def medians(self) -> dict[str, float]:
        """Returns microseconds of an average call, of "original" and of each timed strategy."""
        names = [n for n in ("original", *self.plans) if all(n in each.medians for each in self._trials)]
        shares = list(zip(self._trials, self._shares))
        return {name: sum(share * each.medians[name] for each, share in shares) for name in names}

    def error_ratio(self, strategy: str) -> float:
        return max(each.error_ratio(strategy) for each in self._trials)


def timed_error(call: Callable[[], Any], exact: list[Tensor]) -> tuple[float, float]:
    """Returns the error of one call, and the seconds of the call and the comparison."""
    start = time.perf_counter()
    error = _error(flat(call()), exact)
    return error, time.perf_counter() - start


def _once(calls: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
    """Returns the ``calls`` after a run of each, so that all setup is done."""
    for call in calls:
        call()
    return calls


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def set_layout(module: Any, channels_last: bool) -> None:
    """Set the layout of images that the fused ``module`` accepts and returns, if it has images."""
    if hasattr(module, "channels_last"):
        module.channels_last = channels_last


def _error(outputs: list[Tensor], exact: list[Tensor]) -> float:
    """Returns the root-mean-square error relative to the root mean square of the exact values, for the worst output.

    The error is infinite if NaN or infinities in an output differ from the exact values.
    """
    return max((_relative_error(*pair) for pair in zip(outputs, exact)), default=0.0)


def _relative_error(output: Tensor, truth: Tensor) -> float:
    scale = torch.linalg.vector_norm(truth)
    if not scale.isfinite():
        finite = truth.isfinite()
        if not torch.isclose(output[~finite].double(), truth[~finite], equal_nan=True).all():
            return math.inf
        output, truth = output[finite], truth[finite]
        scale = torch.linalg.vector_norm(truth)
    error = torch.linalg.vector_norm(truth - output)
    relative = float(error / scale) if scale > 0 else float(error) / math.sqrt(max(1, truth.numel()))
    return math.inf if math.isnan(relative) else relative
