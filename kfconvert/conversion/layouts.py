"""Selection of the applied sites of each capture, and of the memory format of its images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..capture import Capture, Part
from ..matching import Site
from ..runtime import CALLS_BEFORE, Program, install, originals, uninstall
from .captures import Captures
from .samples import has_layout
from .selector import Decision, Selector
from .stages import Stages
from .steps import merge_weights
from .workloads import Loads


class Layouts:
    """Decides the sites of all captures. A fused module that serves several captures has one strategy; the first
    capture decides it."""

    def __init__(self, captures: Captures, selector: Selector, loads: Loads):
        self._captures, self._selector, self.loads = captures, selector, loads
        self._decided: dict[int, Site] = {}  # by fused module id, the site that decided its strategy
        self._measured = [*captures.forms, *(part.captures[0] for part in captures.parts)]

    def select(self, stages: Stages) -> None:
        """Apply or reject every site, and set the memory format of every capture."""
        with stages.stage("select", sum(len(captured.sites) for captured in self._measured)) as advance:
            for captured in self._measured:
                self._select_layout(captured)
                self._note(captured)
                for _ in captured.sites:
                    advance()
        for part in self._captures.parts:
            self._decide_others(part)
            if self._selector.timed and (part.method or self._captures.example is None):
                self._reject_slow(part)
        # For a step of one token, the strategies of a prompt may be slow. A step on a static cache is always replayed,
        # never launched.
        steps = [
            form
            for form in self._captures.others
            if form.applied and form.region.call.form.caches and not form.region.takes_static_cache
        ]
        steps = steps if self._selector.timed else []
        if steps:  # their programs would copy weights that they read as one tensor
            forms = self._captures.forms
            merge_weights(forms[0].module, {"": [form.variant(form.applied) for form in forms]})
        for form in steps:
            original, converted = _calls(form, form.leaves)
            with self._installed(form, [converted]):
                slower = self._selector.slower_beyond_doubt(original, converted)
            for site in form.applied if slower else ():
                site.reject(f"calls from generate() are slower as a whole: {slower}")

    def leave_channels_last(self) -> None:
        """Decide all sites again, for contiguous images."""
        self._decided.clear()
        for captured in self._measured:
            self._lay_out(captured, channels_last=False)
            self._note(captured)
        for part in self._captures.parts:
            self._decide_others(part)

    def _note(self, captured: Capture) -> None:
        self._decided |= {id(site.replacement.module): site for site in captured.sites}

    def _reject_slow(self, part: Part) -> None:
        """Reject the sites of a part if its guard takes as much time as they save."""
        first = part.captures[0]
        if not first.applied:
            return
        pairs = [(*_calls(first, load.leaves), load.share) for load in self.loads.of(first)]
        with self._installed(first, [converted for _, converted, _ in pairs]):
            slower = self._selector.slower(pairs)
        for site in (site for captured in part.captures for site in captured.applied if slower):
            site.reject(f"not faster with the guard of {first.path} included: {slower}")

    @contextmanager
    def _installed(self, captured: Capture, calls: Sequence[Callable[[], Any]]) -> Iterator[None]:
        """Context manager in which the captured module runs its program, which has already run ``calls``."""
        ledger = install(captured.module, {"": [captured.variant(captured.applied)]})
        ledger.notices.silent, ledger.graphs.enabled = True, self._selector.replayed
        try:
            with torch.no_grad():
                for converted in calls:
                    for _ in range(CALLS_BEFORE if self._selector.replayed else 1):
                        converted()
                yield
        finally:
            uninstall(captured.module)

    def _select_layout(self, captured: Capture) -> None:
        modules: list[Any] = [site.replacement.module for site in captured.sites if has_layout(site)]
        laid_out = [module.channels_last for module in modules if id(module) in self._decided]
        example = self._captures.example
        if laid_out or (example and captured is not example):
            self._lay_out(captured, laid_out[0] if laid_out else example.channels_last)  # type: ignore[union-attr]
            return
        if not modules or not self._selector.timed:
            self._lay_out(captured, channels_last=bool(modules))
            return
        self._measure(captured, (True, False))
        try:
            programs = {layout: self._laid_out_program(captured, layout) for layout in (True, False)}
        except RuntimeError:  # an operator that accepts contiguous images only
            self._lay_out(captured, channels_last=False)
            return
        if self._selector.faster_layout(programs, self.loads.of(captured)):
            self._lay_out(captured, channels_last=True)

    def _decide_others(self, part: Part) -> None:
        """Decide the sites of a part's further captures like those of its first capture; they share its graph."""
        first, *others = part.captures
        for captured in others:
            captured.channels_last = first.channels_last
            for site, model in zip(captured.sites, first.sites):
                known = self._decided.setdefault(id(site.replacement.module), model)
                Decision.of(known).apply_to(site)
                if has_layout(site) and known is model:
                    site.replacement.module.channels_last = model.replacement.module.channels_last

    def _laid_out_program(self, captured: Capture, channels_last: bool) -> Program:
        """Returns the program for one memory format, after one run with each workload: a run creates its plans while
        the modules have this format."""
        self._lay_out(captured, channels_last)
        program = captured.variant(captured.applied).program
        with torch.no_grad():
            for load in self.loads.of(captured):
                program.run(load.leaves)
        return program

    def _measure(self, captured: Capture, layouts: Sequence[bool]) -> list[Site]:
        """Returns the undecided sites of ``captured``, each measured once in each of the ``layouts``."""
        undecided = [site for site in captured.sites if id(site.replacement.module) not in self._decided]
        self._selector.measure(captured.region, undecided, captured.live, self.loads.of(captured), layouts)
        return undecided

    def _lay_out(self, captured: Capture, channels_last: bool) -> None:
        """Decide the sites of ``captured`` for one memory format of images."""
        captured.channels_last = channels_last
        for site in captured.sites:
            known = self._decided.get(id(site.replacement.module))
            if known is not None:
                Decision.of(known).apply_to(site)
        self._selector.apply(self._measure(captured, (channels_last,)), channels_last)


def _calls(captured: Capture, leaves: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns calls of the captured module's original forward and of its current forward, with these inputs."""
    module, arguments = captured.module, captured.region.call.keywords

    def converted() -> Any:
        return module(**arguments(leaves))  # with a separate cache, which the call writes to

    def original() -> Any:
        with originals():
            return converted()

    return original, converted
