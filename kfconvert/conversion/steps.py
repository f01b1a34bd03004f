"""The steps of one conversion, from a user's module to an installed, validated and timed program."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accuracy import ValidationResult, evaluation, model_outputs
from ..capture import Capture, Part, Parts, capture_forms, parents, refused_in_every_form, with_few
from ..capture.blocks import Repetition
from ..graph import blame, definition
from ..inputs import ExampleCall, is_token_model, token_calls
from ..matching import Match, Replacement, Site
from ..profiling import Comparison, compare_timings
from ..region import CaptureError, LiveTensors
from ..runtime import Program, Variant, install, originals, uninstall, unsteady
from ..settings import max_rewrites
from .judge import Judge, drop_inaccurate
from .own_state import OwnState
from .preparation import prepare
from .selector import Decision, Selector
from .statistics import conversion_stats

Progress = Callable[[str, int, int], None]

# To time the original and the converted model, together.
SECONDS_PER_MODEL = 1.0
LEAST_ROUNDS = 3

# After so many calls writes to weights that leave no trace are looked for. On CUDA each look is a pass over all weights
# that the host has to wait for.
CHECK_WEIGHTS = {"cpu": 100}


class Conversion:
    """The state of one conversion; each method is one step of it."""

    def __init__(
        self,
        validate_accuracy: bool,
        accuracy_threshold: float,
        select: str,
        progress: Progress,
        check_weights: int | None = None,
    ):
        self.validate_accuracy, self.accuracy_threshold = validate_accuracy, accuracy_threshold
        self.check_weights = check_weights
        self.timed = select == "measured"
        self.progress = progress
        self.call = ExampleCall()
        self.counting: dict[nn.Module, str] = {}
        self.captures: list[Capture] = []
        self.parts: list[Part] = []
        self.parts_left_out = 0
        self.regions: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.accuracy: ValidationResult | None = None
        self.timings: Comparison | None = None
        self.modules: dict[Any, Replacement] = {}
        self.decided: dict[int, Site] = {}
        self.reverted: str | None = None
        self.own_state: OwnState | None = None
        self.asked: frozenset[str] = frozenset()

    def prepare(
        self,
        model: nn.Module,
        input_shape: Sequence[int] | None,
        example_inputs: Any,
        device: torch.device,
        dtype: torch.dtype | None,
        inplace: bool,
    ) -> None:
        """Own copy of the model on the device, in eval mode and unconverted, and an example call that it accepts."""
        prepared = prepare(model, input_shape, example_inputs, device, dtype, inplace)
        self.model, self.call, self.counting, self.device = prepared.model, prepared.call, prepared.counting, device
        self.outputs, self.own_state, self.asked = prepared.outputs, prepared.own_state, prepared.asked
        self.repetition = Repetition(self.model)

    def trace(self) -> None:
        """The call as given, the other forms in which people call a token model, and the parts of the model."""
        calls = [self.call]
        if is_token_model(self.model):
            calls += token_calls(self.model, self.call)
        with self._stage("trace", len(calls) + 1) as advance:
            start = time.thread_time()
            refusal = refused_in_every_form(self.model, self.counting, self.outputs, self.asked)
            self._take_forms(calls, capture_forms(self.model, calls, self.repetition, advance, refusal))
            whole = time.thread_time() - start if self.captures else None
            parts = Parts(self.model, self.call, self.counting, self.repetition, self._cheap_call(), whole)
            self._take_parts([] if unsteady(self.asked) else parts.found)
            self.parts_left_out = parts.left_out
            if not self.captures:
                for refused in parts.refused:
                    self._region(refused.path, refused.path, refused.error)
            advance()

    def _cheap_call(self) -> ExampleCall | None:
        """The example call with a few entries in each size that the captured model leaves free."""
        if not self.captures:
            return None
        region, leaves = self.captures[0].region, self.captures[0].leaves
        return ExampleCall((), region.call.keywords(with_few(region, leaves)))

    def _take_forms(self, calls: Sequence[ExampleCall], found: Sequence[Capture | CaptureError]) -> None:
        for call, form in zip(calls, found):
            error = form if isinstance(form, CaptureError) else None
            if error is None:
                form.region.asked = self.asked
                self.captures.append(form)
            self._region(call.summary(), "", error)

    def _take_parts(self, parts: list[Part]) -> None:
        self.parts = parts
        for part in parts:
            for captured in part.captures:
                captured.region.asked = self.asked
                self._region(captured.path, captured.path)

    def _region(self, name: str, module: str, error: CaptureError | None = None) -> None:
        region = {"name": name, "module": module, "captured": error is None, "reason": None, "location": None}
        if error is not None:
            region["reason"] = str(error)
            region["location"] = blame(error) or definition(self.model.get_submodule(module))
        self.regions.append(region)

    def every_capture(self) -> Iterator[Capture]:
        """The captures of the whole model, then those of its parts."""
        yield from self.captures
        for part in self.parts:
            yield from part.captures

    def outermost(self) -> list[Capture]:
        """The captures that serve the example call: that of the model, or the parts that lie in no other."""
        if self.captures:
            return self.captures[:1]
        paths = {captured.path for captured in self.every_capture()}
        return [c for c in self.every_capture() if paths.isdisjoint(parents(c.path))]

    def match(self) -> None:
        """Sites of every capture; those that share weights and function share their fused module."""
        captures = list(self.every_capture())
        with self._stage("match", len(captures)) as advance:
            for captured in captures:
                sites = [self._site(match, captured.live) for match in captured.findings.matches]
                captured.sites = [replace(site, region=captured.path) for site in sites]
                advance()

    def _site(self, match: Match, live: LiveTensors) -> Site:
        replacement = match.pattern.build(match, live.tensor)
        kind = repr(replacement.module)
        places = tuple((name, id(live.tensor(node))) for _, name, node in replacement.bindings)
        shared = self.modules.setdefault((match.pattern.name, kind, places), replacement)
        if shared is not replacement:
            holders = dict(zip(_holders(replacement), _holders(shared)))
            bindings = tuple((holders[owner], name, node) for owner, name, node in replacement.bindings)
            replacement = replace(replacement, module=shared.module, bindings=bindings)
        return Site(match, replacement, kind)

    def select(self) -> None:
        """Every site is applied or rejected, and every capture has its memory format."""
        self.selector = Selector(self.device, self.accuracy_threshold, self.timed)
        measured = [*self.captures, *(part.captures[0] for part in self.parts)]
        with self._stage("select", sum(len(captured.sites) for captured in measured)) as advance:
            for captured in measured:
                self._select_layout(captured)
                self.decided |= {id(site.replacement.module): site for site in captured.sites}
                for _ in captured.sites:
                    advance()
        for part in self.parts:
            for captured in part.captures[1:]:
                self._decide_like(captured, part.captures[0])
            if self.timed and not self.captures:
                self._time_part(part)

    def _time_part(self, part: Part) -> None:
        """Reject the sites of a part of which the guard costs what they save."""
        first = part.captures[0]
        if not first.applied:
            return
        arguments = first.region.call.keywords(first.leaves)

        def original() -> Any:
            with originals():
                return first.module(**arguments)

        install(first.module, {"": [first.variant(first.applied)]}, {}).warning.given = True
        try:
            slower = self.selector.slower(original, lambda: first.module(**arguments))
        finally:
            uninstall(first.module)
        for site in (site for captured in part.captures for site in captured.applied if slower):
            site.reject(f"not faster, together with the guard of {first.path}: {slower}")

    def _select_layout(self, capture: Capture) -> None:
        modules = [site.replacement.module for site in capture.sites if _has_layout(site)]
        laid_out = [module.channels_last for module in modules if id(module) in self.decided]
        if laid_out or (self.captures and capture is not self.captures[0]):
            self._lay_out(capture, laid_out[0] if laid_out else self.captures[0].channels_last)
            return
        if not modules or not self.timed:
            self._lay_out(capture, channels_last=bool(modules))
            return
        self._measure(capture, (True, False))
        programs = {layout: self._laid_out_program(capture, layout) for layout in (True, False)}
        if self.selector.faster_layout(programs, capture.leaves):
            self._lay_out(capture, channels_last=True)

    def _decide_like(self, captured: Capture, first: Capture) -> None:
        """Decide the sites of ``captured`` as those of ``first``, whose graph it shares; nothing is measured."""
        captured.channels_last = first.channels_last
        for site, model in zip(captured.sites, first.sites):
            known = self.decided.setdefault(id(site.replacement.module), model)
            Decision.of(known).apply_to(site)
            if _has_layout(site) and known is model:
                site.replacement.module.channels_last = model.replacement.module.channels_last

    def _laid_out_program(self, capture: Capture, channels_last: bool) -> Program:
        """The program for one memory format, run once: its plans are made while the modules are set for it."""
        self._lay_out(capture, channels_last)
        program = capture.variant(capture.applied).program
        with torch.no_grad():
            program.run(capture.leaves)
        return program

    def _measure(self, capture: Capture, layouts: Sequence[bool]) -> list[Site]:
        """The sites of ``capture`` to decide, measured in each of the ``layouts``; nothing is measured twice."""
        undecided = [site for site in capture.sites if id(site.replacement.module) not in self.decided]
        self.selector.measure(capture.region, undecided, capture.live, capture.leaves, layouts)
        return undecided

    def _lay_out(self, capture: Capture, channels_last: bool) -> None:
        """Decide the sites of ``capture`` for one memory format of images."""
        capture.channels_last = channels_last
        for site in capture.sites:
            # A module that serves several captures can have one strategy only: the first capture decides.
            known = self.decided.get(id(site.replacement.module))
            if known is not None:
                Decision.of(known).apply_to(site)
        self.selector.apply(self._measure(capture, (channels_last,)), channels_last)
        limit = max_rewrites(len(capture.sites))
        for site in capture.applied[limit:]:
            site.reject(f"KFCONVERT_MAX_REWRITES is {limit}")

    def replace(self) -> None:
        """The programs: of every call form of the whole model, and of every part in which a site was applied."""
        captures = list(self.every_capture())
        with self._stage("replace", len(captures)) as advance:
            self.variants: dict[str, list[Variant]] = {}
            for captured in captures:
                if captured.path == "" or captured.applied:
                    self.variants.setdefault(captured.path, []).append(captured.variant(captured.applied))
                advance()
        self.outdated = False

    def validate(self) -> None:
        """Judge the programs against float64; drop the sites that make them fail; install what remains."""
        with self._stage("validate", 2) as advance:
            if self.validate_accuracy and self.variants:
                judge = Judge(self.model, self.call, self.outputs, self.accuracy_threshold)
                if any(self.variants.keys() - {""}):
                    self._validate_parts(judge)
                advance()
                if self.captures and not self.reverted:
                    self._validate(judge, self.captures[0])
            advance()
        if self.outdated and self.variants:
            self.replace()
        self.ledger = install(self.model, self.variants, {})
        self.ledger.warning.given = True  # until it is handed over: misses within a conversion concern nobody

    def _validate(self, judge: Judge, capture: Capture) -> None:
        def judged(items: Sequence[list[Site]]) -> ValidationResult:
            variant = capture.variant([site for item in items for site in item])

            def run(call: ExampleCall) -> Any:
                given = call.copied()  # as the original gets them
                with evaluation(self.model):
                    return variant.run(capture.region.call.leaves(given.args, given.kwargs))

            return judge(run)

        self.accuracy = self._accurate(lambda: [[site] for site in capture.applied], judged)
        self._revert_unless_accurate("the captured graph itself")

    def _validate_parts(self, judge: Judge) -> None:
        """Judge the model with its parts converted and its own forward."""
        captures = [captured for part in self.parts for captured in part.captures]

        def applied() -> list[list[Site]]:
            """The applied sites, those of one place in the captures of one part together."""
            by_kind: dict[Any, list[Site]] = {}
            for part in self.parts:
                for captured in part.captures:
                    for index, site in enumerate(captured.sites):
                        if site.status == "applied":
                            by_kind.setdefault((part.captures[0].path, index), []).append(site)
            return list(by_kind.values())

        def judged(items: Sequence[list[Site]]) -> ValidationResult:
            wanted = {id(site) for item in items for site in item}
            chosen = {c.path: [site for site in c.applied if id(site) in wanted] for c in captures}
            variants = {c.path: [c.variant(chosen[c.path])] for c in captures if chosen[c.path]}
            install(self.model, variants, {}).warning.given = True  # misses within a conversion concern nobody
            try:
                return judge(lambda call: model_outputs(self.model, call.args, call.kwargs))
            finally:
                uninstall(self.model)
                # What they have packed would lie beside what the whole model's program is about to pack.
                for [variant] in variants.values():
                    variant.program.clear()

        self.accuracy = self._accurate(applied, judged)
        self._revert_unless_accurate("a captured part")

    def _revert_unless_accurate(self, captured: str) -> None:
        if self.accuracy.passed is None:
            self._revert(self.accuracy.reason)
        elif not self.accuracy.passed:
            self._revert(f"{captured} differs from the model: {self.accuracy.reason}")

    def _accurate(
        self, applied: Callable[[], list[list[Site]]], judged: Callable[[Sequence[list[Site]]], ValidationResult]
    ) -> ValidationResult:
        """What is ``judged`` of the ``applied`` sites, when those that make the outputs inaccurate are dropped."""
        accuracy = judged(applied())
        if accuracy.passed is None:
            return accuracy
        if not accuracy.passed and any(captured.channels_last for captured in self.outermost()):
            # Library convolutions sum in another order for each layout, at times with twice the error.
            self._leave_channels_last()
            accuracy = judged(applied())
        return accuracy if accuracy.passed else drop_inaccurate(applied(), accuracy, judged, self._drop)

    def _leave_channels_last(self) -> None:
        """Decide all sites anew, for the usual memory format."""
        self.decided.clear()
        self.outdated = True
        for captured in (*self.captures, *(part.captures[0] for part in self.parts)):
            self._lay_out(captured, channels_last=False)
            self.decided |= {id(site.replacement.module): site for site in captured.sites}
        for part in self.parts:
            for captured in part.captures[1:]:
                self._decide_like(captured, part.captures[0])

    def _drop(self, sites: Sequence[Site], reason: str) -> None:
        """Reject ``sites`` and all others that share their modules."""
        self.outdated = True
        modules = {id(site.replacement.module) for site in sites}
        for captured in self.every_capture():
            for site in captured.sites:
                if id(site.replacement.module) in modules:
                    site.reject(reason)

    def time(self) -> None:
        """Original against converted; a model that got slower is given back unconverted."""
        if not any(captured.applied for captured in self.outermost()):
            return
        own = self.call.copied()
        args, kwargs = own.args, own.kwargs

        def original() -> Any:
            with originals():
                return self.model(*args, **kwargs)

        candidates = {"original": original, "converted": lambda: self.model(*args, **kwargs)}
        with self._stage("time", 1) as advance:
            self.timings = compare_timings(
                candidates, self.device, budget_s=SECONDS_PER_MODEL, min_rounds=LEAST_ROUNDS, settled=True
            )
            advance()
        speedup = self.timings.speedup("converted")
        if self.timed and speedup.high < 1:
            self._revert(f"the converted model is slower as a whole: {speedup.summary()}")

    def _revert(self, reason: str) -> None:
        self.reverted = reason
        for captured in self.every_capture():
            for site in captured.applied:
                site.reject(reason)
        self.variants.clear()

    def restore_own_state(self) -> None:
        """Put back what the calls so far have changed in what the model keeps for itself."""
        if self.own_state is not None:
            self.own_state.restore()

    def calls_between_checks(self) -> int:
        """After how many calls the weights are compared with what they were; 0 for never."""
        return CHECK_WEIGHTS.get(self.device.type, 0) if self.check_weights is None else self.check_weights

    def report(self) -> dict[str, Any]:
        """The statistics, which the converted model carries as well; warns where nothing was fused."""
        stats = self.ledger.stats = conversion_stats(self)
        self.ledger.begin(stats["check_weights"])
        for captured in self.every_capture():
            captured.region.release_graph()
        if not self.variants:
            uninstall(self.model)
            self.model.__dict__["kfconvert_info"] = partial(dict, stats, guard={"hits": 0, "misses": {}}, parts={})
        if stats["total_replaced"] == 0:
            warnings.warn(f"kfconvert fused nothing in {stats['model']}: {stats['nothing_fused']}", stacklevel=3)
        return stats

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        start, done = time.perf_counter(), 0

        def advance() -> None:
            nonlocal done
            done += 1
            self.progress(name, done, total)

        self.progress(name, 0, total)
        yield advance
        self.seconds[name] = time.perf_counter() - start


def _holders(replacement: Any) -> list[nn.Module]:
    """The distinct modules that hold the tensors of a replacement, in the order of its bindings."""
    return list(dict.fromkeys(owner for owner, _, _ in replacement.bindings))


def _has_layout(site: Site) -> bool:
    return hasattr(site.replacement.module, "channels_last")
