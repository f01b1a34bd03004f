"""A model and its conversion, treated alike: changes of state made to both, in threads where wanted, and compared."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import (  # noqa: F401 - they register changes
    adapter_changes,
    attribute_changes,
    module_changes,
    optimizer_changes,
    process_changes,
    weight_changes,
)
from .changes import CHANGES, Change, Subject, Undo, without_frames

__all__ = ["CHANGES", "Alike", "Change", "Subject", "assert_close", "difference", "in_a_thread"]

# Largest difference relative to the largest element; a stale weight makes one of 1e-2 and more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What ``function`` returns, or its exception, from a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((value, error),) = results
    if error is not None:
        raise error
    return value


class Alike:
    """``original`` and ``converted``, each with all that was done to it."""

    def __init__(self, original: Subject, converted: Subject):
        self.original, self.converted = original, converted
        self.both = (original, converted)

    def apply(self, change: Change, seed: int = 0, thread: bool = False) -> Undo:
        """Make ``change`` at the ``seed``-th of its targets; what is returned undoes it.

        Raises:
            Exception: what the change raises with both models.
        """
        undone: list[Undo] = []
        refused: list[Exception] = []
        subjects = self.both[:1] if change.process_wide else self.both
        for subject in subjects:
            targets = change.targets(subject.model)
            torch.manual_seed(seed)

            def make(subject: Subject = subject, targets: Any = targets) -> Undo:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return change.apply(subject, targets[seed % len(targets)])

            try:
                undone.append(in_a_thread(make) if thread else make())
            except Exception as error:
                refused.append(without_frames(error))
        if refused and len(refused) < len(subjects):
            raise AssertionError("the change raises with one of the models only") from refused[0]
        self._refresh(change)
        if refused:
            raise refused[0]
        if undone[0] is None:
            return None

        def undo() -> None:
            for each in undone:
                each()
            self._refresh(change)

        return undo

    def _refresh(self, change: Change) -> None:
        if not change.announced:
            self.converted.model.kfconvert_refresh()

    def each(self, function: Callable[[nn.Module], Any]) -> None:
        for subject in self.both:
            function(subject.model)

    def hits(self) -> int:
        """Calls so far that fused programs served: those of the model and of its parts."""
        info = self.converted.model.kfconvert_info()
        return info["guard"]["hits"] + sum(part["hits"] for part in info["parts"].values())

    def call(self, what: str, seed: int = 0) -> Any:
        """Outputs of the original, which those of the converted model must equal."""
        expected, actual = self.original.call(seed), self.converted.call(seed)
        assert_close(actual, expected, what)
        return expected

    def compare_gradients(self, what: str, seed: int = 0) -> None:
        """Compare all gradients together: a single one may be nothing but rounding, such as that of the bias of
        attention keys."""
        expected, actual = self.original.gradients(seed), self.converted.gradients(seed)
        if isinstance(expected, list) and isinstance(actual, list):
            given = [gradient is not None for gradient in expected]
            assert [gradient is not None for gradient in actual] == given, f"{what}: other parameters have gradients"
            expected, actual = (
                torch.cat([torch.zeros(1), *(g.flatten() for g in gradients if g is not None)])
                for gradients in (expected, actual)
            )
        assert_close(actual, expected, f"{what}: gradients")


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest element."""
    if actual.numel() == 0:
        return 0.0
    scale = expected.double().abs().max().clamp_min(1e-30)
    return ((actual.double() - expected.double()).abs().max() / scale).item()


def assert_close(actual: Any, expected: Any, what: str) -> None:
    """The same structure and the same numbers but for rounding, or exceptions of one type."""
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        if type(actual) is not type(expected):
            raise AssertionError(f"{what}: {actual!r} instead of {expected!r}") from (
                actual if isinstance(actual, Exception) else None
            )
        return
    (ours, spec), (theirs, other) = pytree.tree_flatten(actual), pytree.tree_flatten(expected)
    assert spec == other, f"{what}: another structure"
    for one, wanted in zip(ours, theirs):
        if not isinstance(wanted, Tensor):
            assert one == wanted, what
            continue
        assert one.shape == wanted.shape and one.dtype is wanted.dtype, f"{what}: {one.dtype}{list(one.shape)}"
        found = difference(one, wanted)
        assert found <= TOLERANCE.get(wanted.dtype, 0), f"{what}: they differ by {found:.1e}"
