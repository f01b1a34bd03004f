"""The steps of one conversion, from a user's module to an installed, validated and timed program."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .canonical import canonicalise
from .inputs import ExampleCall, InputError, example_call, is_token_model, token_calls
from .matcher import Match, NearMiss, Replacement, find, mark_weights
from .patterns import REGISTRY
from .probing import admit_sizes_of_one
from .profiling import Comparison, compare_timings
from .program import Program
from .rewriter import LiveTensors, Site, rewrite
from .runtime import Variant, install, uninstall
from .selector import Selector
from .stats import conversion_stats
from .tracer import CaptureError, Region, trace
from .validator import ValidationResult, compare, model_outputs, reference_outputs

Progress = Callable[[str, int, int], None]


class ConversionError(ValueError):
    """The model, inputs, device or dtype cannot be converted as asked; the message is one clear line."""


@dataclass
class Capture:
    """One captured call form on its way through the job."""

    call: ExampleCall
    region: Region
    live: LiveTensors
    leaves: list[Any]
    sites: list[Site] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    channels_last: bool = False

    @property
    def applied(self) -> list[Site]:
        return [site for site in self.sites if site.status == "applied"]

    def variant(self, sites: Sequence[Site]) -> Variant:
        return Variant(self.region, rewrite(self.region, sites, self.live, self.channels_last))


class Conversion:
    """The state of one conversion; each method is one step of it."""

    def __init__(self, validate_accuracy: bool, accuracy_threshold: float, select: str, progress: Progress):
        self.validate_accuracy, self.accuracy_threshold = validate_accuracy, accuracy_threshold
        self.timed = select == "measured"
        self.progress = progress
        self.captures: list[Capture] = []
        self.regions: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.accuracy: ValidationResult | None = None
        self.timings: Comparison | None = None
        self.modules: dict[Any, Replacement] = {}
        self.reverted: str | None = None

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
        if not isinstance(model, nn.Module):
            raise ConversionError(f"expected a torch.nn.Module, got {type(model).__name__}")
        if dtype is not None and not dtype.is_floating_point:
            raise ConversionError(f"dtype must be a floating-point dtype, not {dtype}")
        if not inplace:
            try:
                model = copy.deepcopy(model)
            except Exception as error:
                message = f"the model cannot be copied ({_first_line(error)}); pass inplace=True"
                raise ConversionError(message) from error
        uninstall(model)
        self.model = model.to(device, dtype).eval() if dtype else model.to(device).eval()
        self.device = device
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        try:
            self.call = example_call(self.model, input_shape, example_inputs, device, dtype or own)
        except InputError as error:
            raise ConversionError(str(error)) from None
        try:
            model_outputs(self.model, self.call.args, self.call.kwargs)
        except Exception as error:  # the model's own code may raise anything
            name = type(model).__name__
            raise ConversionError(f"{name} does not accept {self.call.summary()}: {_first_line(error)}") from error

    def trace(self) -> None:
        """The call as given, and the other forms in which people call a token model."""
        calls = [self.call]
        if is_token_model(self.model):
            calls += token_calls(self.model, self.call)
        with self._stage("trace", len(calls)) as advance:
            for call in calls:
                self._capture(call)
                advance()

    def _capture(self, call: ExampleCall) -> None:
        name, reason = call.summary(), None
        for free in (("batch", "sequence"), ("batch",), ()):
            try:
                region = trace(self.model, call, free)
                mark_weights(region.graph, (*region.slots, *region.constants))
                canonicalise(region.graph)
            except CaptureError as error:
                reason = reason or str(error)
                continue
            live = LiveTensors(self.model, region)
            leaves = pytree.tree_leaves(list(region.call.arguments.values()))
            capture = Capture(call, region, live, leaves)
            admit_sizes_of_one(self.model, region, capture.variant(()).run, leaves)
            if region.guard.refusal(leaves) is None:
                self.captures.append(capture)
                self.regions.append({"name": name, "captured": True, "reason": None})
                return
            reason = reason or region.guard.refusal(leaves)
        self.regions.append({"name": name, "captured": False, "reason": reason})

    def match(self) -> None:
        """Sites of every capture; those that share weights and function share their fused module."""
        with self._stage("match", len(self.captures)) as advance:
            for capture in self.captures:
                findings = find(capture.region.graph, REGISTRY)
                capture.sites = [self._site(match, capture.live) for match in findings.matches]
                capture.near_misses = findings.near_misses
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
        total = sum(len(capture.sites) for capture in self.captures)
        with self._stage("select", total) as advance:
            for capture in self.captures:
                self._select_layout(capture)
                for _ in capture.sites:
                    advance()

    def _select_layout(self, capture: Capture) -> None:
        if capture is not self.captures[0]:
            self._lay_out(capture, self.captures[0].channels_last)
            return
        programs = {}
        if any(hasattr(site.replacement.module, "channels_last") for site in capture.sites):
            programs[True] = self._laid_out_program(capture, channels_last=True)
        programs[False] = self._laid_out_program(capture, channels_last=False)
        if self.selector.faster_layout(programs, capture.leaves):
            self._lay_out(capture, channels_last=True)

    def _laid_out_program(self, capture: Capture, channels_last: bool) -> Program:
        """The program for one memory format, run once: its plans are made while the modules are set for it."""
        self._lay_out(capture, channels_last)
        program = capture.variant(capture.applied).program
        with torch.no_grad():
            program.run(capture.leaves)
        return program

    def _lay_out(self, capture: Capture, channels_last: bool) -> None:
        """Decide the sites of ``capture`` for one memory format of images."""
        capture.channels_last = channels_last
        self.selector.select(capture.region, capture.sites, capture.live, capture.leaves, channels_last)
        limit = int(os.environ.get("KFCONVERT_MAX_REWRITES", len(capture.sites)))
        for site in capture.applied[limit:]:
            site.reject(f"KFCONVERT_MAX_REWRITES is {limit}")

    def replace(self) -> None:
        with self._stage("replace", len(self.captures)) as advance:
            self.variants = []
            for capture in self.captures:
                self.variants.append(capture.variant(capture.applied))
                advance()

    def validate(self) -> None:
        """Judge the first variant against float64; drop the sites that make it fail; install what remains."""
        with self._stage("validate", 1) as advance:
            if self.validate_accuracy and self.captures:
                self._validate(self.captures[0])
            advance()
        self.guarded = install(self.model, self.variants, {})

    def _validate(self, capture: Capture) -> None:
        args, kwargs = self.call.args, self.call.kwargs
        reference = reference_outputs(self.model, args, kwargs)
        original = model_outputs(self.model, args, kwargs)

        def judge(sites: Sequence[Site]) -> ValidationResult:
            with torch.no_grad():
                outputs = capture.variant(sites).run(capture.leaves)
            return compare(reference, original, outputs, self.accuracy_threshold)

        self.accuracy = judge(capture.applied)
        if not self.accuracy.passed and capture.channels_last:
            # Library convolutions sum in another order for each layout, at times with twice the error.
            for each in self.captures:
                self._lay_out(each, channels_last=False)
            self.accuracy = judge(capture.applied)
        while not self.accuracy.passed and capture.applied:
            blamed = _blame(capture.applied, lambda sites: judge(sites).passed)
            for site in (site for each in self.captures for site in each.sites):
                if site.replacement.module is blamed.replacement.module:
                    site.reject(f"dropped after validation: {self.accuracy.reason}")
            self.accuracy = judge(capture.applied)
        self.variants = [each.variant(each.applied) for each in self.captures]
        if not self.accuracy.passed:
            self._revert(f"the captured graph itself differs from the model: {self.accuracy.reason}")

    def time(self) -> None:
        """Original against converted; a model that got slower is given back unconverted."""
        if not any(capture.applied for capture in self.captures):
            return
        args, kwargs = self.call.args, self.call.kwargs
        candidates = {
            "original": lambda: self.guarded.original(*args, **kwargs),
            "converted": lambda: self.model(*args, **kwargs),
        }
        with self._stage("time", 1) as advance:
            self.timings = compare_timings(candidates, self.device, budget_s=2.0)
            advance()
        speedup = self.timings.speedup("converted")
        if self.timed and speedup.high < 1:
            self._revert(f"the converted model is slower as a whole: {speedup.summary()}")

    def _revert(self, reason: str) -> None:
        self.reverted = reason
        for capture in self.captures:
            for site in capture.applied:
                site.reject(reason)
        self.variants.clear()

    def report(self) -> dict[str, Any]:
        """The statistics, which the converted model carries as well; warns where nothing was fused."""
        stats = self.guarded.stats = conversion_stats(self)
        self.guarded.reset_counters()
        if not self.variants:
            uninstall(self.model)
            self.model.__dict__["kfconvert_info"] = partial(dict, stats, guard={"hits": 0, "misses": {}})
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


def _blame(sites: list[Site], passes: Callable[[Sequence[Site]], bool]) -> Site:
    """The site at which the growing list of sites first fails, by bisection."""
    good, bad = 0, len(sites)
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(sites[:middle]):
            good = middle
        else:
            bad = middle
    return sites[bad - 1]


def resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is None:
        tensor = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
        return tensor.device if tensor is not None else torch.device("cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConversionError(f"device {device} cannot be used: {_first_line(error)}") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
