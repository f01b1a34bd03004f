"""Accuracy validation of the programs; drops the sites that fail it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..accuracy import ValidationResult, evaluation, model_outputs
from ..capture import Capture
from ..inputs import ExampleCall
from ..matching import Site
from ..runtime import Variant, install, uninstall
from .captures import Captures
from .judge import Judge, drop_inaccurate
from .layouts import Layouts
from .preparation import Prepared
from .stages import Stages


@dataclass(frozen=True)
class Verdict:
    """``reverted``: why the conversion must not be used, or None. ``dropped``: whether sites were dropped, or decided
    again, so that new programs are needed. ``judge``: compares the model's forward; None if it was not validated."""

    accuracy: ValidationResult | None = None
    reverted: str | None = None
    dropped: bool = False
    judge: Judge | None = None


def validate(
    prepared: Prepared, captures: Captures, layouts: Layouts, accuracy_threshold: float | None, stages: Stages
) -> Verdict:
    """Compare the applied sites against float64, and drop the sites that fail.

    Args:
        accuracy_threshold: None for no validation.
    """
    judged = _Validation(prepared, captures, layouts)
    of_parts = any(captured.applied for part in captures.parts if not part.method for captured in part.captures)
    judge = None
    with stages.stage("validate", 2) as advance:
        if accuracy_threshold is not None and (captures.example or of_parts or prepared.methods):
            judge = Judge(prepared.model, prepared.call, prepared.outputs, accuracy_threshold)
            if of_parts:
                judged.judge_parts(judge)
            advance()
            if captures.example is not None and not judged.reverted:
                judged.judge_whole(judge, captures.example)
            for call, outputs in prepared.methods if not judged.reverted else ():
                judged.judge_method(Judge(prepared.model, call, outputs, accuracy_threshold), call.method)
        advance()
    return Verdict(judged.accuracy, judged.reverted, judged.dropped, judge)


def revert(captures: Captures, reason: str) -> str:
    for captured in captures.every():
        for site in captured.applied:
            site.reject(reason)
    return reason


class _Validation:
    def __init__(self, prepared: Prepared, captures: Captures, layouts: Layouts):
        self._model, self._captures, self._layouts = prepared.model, captures, layouts
        self.accuracy: ValidationResult | None = None
        self.reverted: str | None = None
        self.dropped = False

    def judge_whole(self, judge: Judge, captured: Capture) -> None:
        """Validate the program of the model's first call form."""

        def judged(items: Sequence[list[Site]], briefly: bool = False) -> ValidationResult:
            variant = captured.variant([site for item in items for site in item])

            def run(call: ExampleCall) -> Any:
                given = call.copied()  # like the original's arguments
                with evaluation(self._model):
                    leaves: Any = captured.region.call.leaves(given.args, given.kwargs)
                    return variant.run(leaves, passed=captured.region.call.passed(given.args, given.kwargs))

            return judge(run, briefly)

        self._conclude("the captured graph itself", lambda: [[site] for site in captured.applied], judged)

    def judge_method(self, judge: Judge, method: str | None) -> None:
        """Validate a method of the model with its example call; this is not the accuracy in the report."""
        accuracy = self.accuracy
        self.judge_parts(judge, method)
        self.accuracy = accuracy or self.accuracy

    def judge_parts(self, judge: Judge, method: str | None = None) -> None:
        """Validate the model's original forward, or a method, with its converted parts."""
        parts = [part for part in self._captures.parts if part.method in (None, method)]
        captures = [captured for part in parts for captured in part.captures]

        def applied() -> list[list[Site]]:
            """Returns the applied sites, grouped by place over the captures of one part."""
            by_kind: dict[Any, list[Site]] = {}
            for part in parts:
                for captured in part.captures:
                    for index, site in enumerate(captured.sites):
                        if site.status == "applied":
                            by_kind.setdefault((id(part), index), []).append(site)
            return list(by_kind.values())

        def judged(items: Sequence[list[Site]], briefly: bool = False) -> ValidationResult:
            wanted = {id(site) for item in items for site in item}
            variants: dict[str, list[Variant]] = {}
            for c in captures:
                if chosen := [site for site in c.applied if id(site) in wanted]:
                    variants.setdefault(c.path, []).append(c.variant(chosen))
            install(self._model, variants).notices.silent = True  # misses in a conversion are irrelevant
            try:
                return judge(lambda call: model_outputs(self._model, call.args, call.kwargs, call.method), briefly)
            finally:
                uninstall(self._model)
                # Frees packed weights of the parts before the program of the whole model packs its weights.
                for variant in (each for found in variants.values() for each in found):
                    variant.program.clear()

        self._conclude("a captured part", applied, judged)

    def _conclude(
        self,
        captured: str,
        applied: Callable[[], list[list[Site]]],
        judged: Callable[..., ValidationResult],
    ) -> None:
        """Set the ``judged`` result of the ``applied`` sites, after dropping sites with inaccurate outputs."""
        accuracy = judged(applied())
        if accuracy.passed is False and any(each.channels_last for each in self._captures.outermost()):
            # Library convolutions sum in another order for each layout, sometimes with twice the error.
            self._layouts.leave_channels_last()
            self.dropped = True
            accuracy = judged(applied())
        if accuracy.passed is False:
            accuracy = drop_inaccurate(applied(), accuracy, judged, self._drop)
        self.accuracy = accuracy
        if not accuracy.passed:
            differs = "" if accuracy.passed is None else f"{captured} differs from the model: "
            self.reverted = revert(self._captures, f"{differs}{accuracy.reason}")

    def _drop(self, sites: Sequence[Site], reason: str) -> None:
        """Reject ``sites`` and all others that share their modules."""
        self.dropped = True
        modules = {id(site.replacement.module) for site in sites}
        for captured in self._captures.every():
            for site in captured.sites:
                if id(site.replacement.module) in modules:
                    site.reject(reason)
