"""Accuracy checks of a converted model, and removal of the sites that make it inaccurate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..accuracy import Original, ValidationResult, compare_all, model_outputs, reference_outputs
from ..inputs import ExampleCall, bounded_lookups
from ..matching import Site
from ..runtime import originals

# Bisection finds, and drops, the site at which the outputs become inaccurate, at most this many times. If the model
# still fails, the cause is the sum of many sites, each of which is accurate enough by itself.
MOST_BLAMED = 4
# The cause is such a sum, too, if the error without the found site is still this share of the previous error.
HARDLY_LESS = 0.9
# One input is enough if its error is at most CLEAR_SHARE of the threshold, or CLEAR_RATIO times the original's error:
# the largest errors for other inputs differ by some tens of percent only.
CLEAR_SHARE, CLEAR_RATIO = 0.5, 1.25
# With at least MANY_VALUES values, the mean error is statistically significant. If it is at most CLEAR_MEAN times the
# original's, the largest errors for other inputs are near the original's, too.
MANY_VALUES, CLEAR_MEAN = 500, 1.1
# A failure may be chance with fewer than MANY_VALUES values, or if only the largest error fails while the mean error
# is clear. In these cases, this many further inputs are compared.
FURTHER = 8
# With several inputs, the threshold is multiplied by this factor, so that later inputs pass as well.
SHARE_OF_SEVERAL = 0.7


class Judge:
    """Compares a converted model with its original against float64; ``outputs`` are the original's for ``call``.

    If one call is not conclusive, variations of it are compared as well, since the largest error for one input varies
    by chance.
    """

    def __init__(self, model: nn.Module, call: ExampleCall, outputs: Any, accuracy_threshold: float):
        self._model, self._accuracy_threshold = model, accuracy_threshold
        self._samples = [self._sample(call, outputs)]
        self._variations = list(_CHANGES)
        self._further = [_turned(amount) for amount in range(3, 3 + FURTHER)]

    def __call__(self, run: Callable[[ExampleCall], Any], briefly: bool = False) -> ValidationResult:
        """``run`` returns the converted model's outputs for a call; ``briefly``: a failure's errors do not matter."""
        runs = []
        for call, original in chain(list(self._samples), self._made(self._variations)):
            runs.append(original.run(run(call)))
            share, is_clear = (1, self._is_clear) if len(runs) == 1 else (SHARE_OF_SEVERAL, self._is_clear_by_mean)
            result = compare_all(runs, share * self._accuracy_threshold)
            if is_clear(result) if result.passed else briefly and self._fails_anyway(runs, result):
                break
        else:
            by_chance = self._values() * len(runs) < MANY_VALUES or self._is_clear_by_mean(result)
            if not result.passed and by_chance:
                runs += [original.run(run(call)) for call, original in self._made(self._further)]
                result = compare_all(runs, SHARE_OF_SEVERAL * self._accuracy_threshold)
        return replace(result, accuracy_threshold=self._accuracy_threshold)

    def _fails_anyway(self, runs: list[Any], result: ValidationResult) -> bool:
        """Whether a model with this ``result`` for the first samples fails even if all others are without error."""
        if self._variations or not all(isfinite(new.max_rel) for _, new in result.outputs):
            return False  # the original's errors are unknown, or infinite
        best = [*runs, *(original.exact() for _, original in self._samples[len(runs) :])]
        result = compare_all(best, SHARE_OF_SEVERAL * self._accuracy_threshold)
        own, is_small = result.original_error, self._values() * len(best) < MANY_VALUES
        by_chance = is_small or any(own and new.mean_rel <= CLEAR_MEAN * own.mean_rel for _, new in result.outputs)
        return not result.passed and not (self._further and by_chance)

    def _made(self, changes: list[Callable[[Tensor], Tensor]]) -> Iterator[tuple[ExampleCall, Original]]:
        """Yields samples of the call with each of the ``changes``, which are consumed."""
        example, _ = self._samples[0]
        while changes:
            call = example.map_tensors(changes.pop())
            try:
                with bounded_lookups(call.tensors()):
                    self._samples.append(self._sample(call))
            except Exception:  # the model may reject a variation with any error
                continue
            yield self._samples[-1]

    def _is_clear(self, result: ValidationResult) -> bool:
        error = result.optimized_error
        is_small = error is None or error.max_rel <= CLEAR_SHARE * self._accuracy_threshold
        is_close = result.ratio is not None and result.ratio <= CLEAR_RATIO
        return is_small or is_close or self._is_clear_by_mean(result)

    def _is_clear_by_mean(self, result: ValidationResult) -> bool:
        own, error = result.original_error, result.optimized_error
        is_close = own is not None and error is not None and error.mean_rel <= CLEAR_MEAN * own.mean_rel
        return is_close and self._values() >= MANY_VALUES

    def _values(self) -> int:
        """Returns the number of values of the smallest inexact output."""
        leaves = tree_leaves(self._samples[0][1].outputs)
        inexact = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return min((leaf.numel() for leaf in inexact), default=0)

    def _sample(self, call: ExampleCall, outputs: Any = None) -> tuple[ExampleCall, Original]:
        arguments = self._model, call.args, call.kwargs, call.method
        with originals():  # parts may be installed while several are compared
            outputs = model_outputs(*arguments) if outputs is None else outputs
            return call, Original(reference_outputs(*arguments), outputs)


def _turned(amount: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.roll(amount, -1) if tensor.dim() else tensor


_CHANGES = (lambda tensor: tensor.flip(-1) if tensor.dim() else tensor, _turned(1), _turned(2))


def drop_inaccurate(
    items: list[list[Site]],
    accuracy: ValidationResult,
    judge: Callable[..., ValidationResult],
    drop: Callable[[list[Site], str], None],
) -> ValidationResult:
    """Drop ``items`` until the others pass; each item is dropped or kept as a whole.

    Args:
        accuracy: the result with all items applied.
        judge: compares the model with only these items applied, optionally ``briefly``.
        drop: rejects the sites of an item, with the given reason.
    """
    items = list(items)
    for _ in range(MOST_BLAMED):
        if accuracy.passed or not items:
            return accuracy
        blamed = items.pop(_passing(items, judge))
        drop(blamed, f"dropped after validation: {accuracy.reason}")
        before, accuracy = accuracy, judge(items)
        if before.ratio is not None and accuracy.ratio is not None and accuracy.ratio > HARDLY_LESS * before.ratio:
            break
    if not accuracy.passed and items:
        items.sort(key=lambda item: max(site.error_ratio or 0.0 for site in item))
        count = _passing(items, judge)
        for item in items[count:]:
            drop(
                item,
                f"dropped after validation as one of the least accurate sites, which together fail: {accuracy.reason}",
            )
        accuracy = judge(items[:count])
    return accuracy


def _passing(items: list[list[Site]], judge: Callable[..., ValidationResult]) -> int:
    """Returns, by bisection, a number of first ``items`` that pass while one more fails; all items together must
    fail."""
    good, bad = 0, len(items)
    while bad - good > 1:
        middle = (good + bad) // 2
        if judge(items[:middle], True).passed:
            good = middle
        else:
            bad = middle
    return good
