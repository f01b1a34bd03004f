"""Selects the submodules of a model that are captured separately, and their free sizes.

Parts serve models that cannot be captured as a whole (a key-value cache, lists of images, control flow on data). They
also serve calls that fail the model's guard, and methods other than ``forward``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from torch import nn

from ..inputs import ExampleCall, bounded_lookups, variations, widened
from ..region import CaptureError, Dimensions
from .captured import Capture, capture
from .deadline import Budget
from .module_times import seconds_within
from .structure import groups, integers, is_operator
from .submodule_calls import kind_of, observe, opaque_kind, outlines, sizes
from .tracer import call_form

# In seconds of processor time of this thread, for one choice of free sizes: with many free sizes, the capture of
# windowed attention takes minutes. Wall-clock time would find fewer parts on a busy machine.
PATIENCE = 8.0
# No capture begins with fewer seconds left.
LEAST_SECONDS = 1.0


@dataclass
class Part:
    """Submodules of one structure that share one captured graph: the traced module first, then the others.

    ``method``: the name of the method whose example call was captured, None for the model's.
    """

    captures: list[Capture]
    method: str | None = None


@dataclass(frozen=True)
class Refused:
    """A submodule that could not be captured, and the reason."""

    path: str
    error: CaptureError


class Parts:
    """The search for parts, in the order of decreasing time of the submodules.

    ``found`` has the parts, ``refused`` the submodules that could not be captured, ``left_out`` the number of
    submodules that the budget did not cover.

    Args:
        counting: modules that no graph may replace, each with the reason.
        put_back: restores the state of the model after the example call: a model that stores sizes of its inputs may
            reject others afterwards.
        fewest: whether only calls like the example matter: image sizes stay fixed, and no modules inside captured ones
            are captured for calls that the outer guard refuses.
        budget: the processor time for all captures.
    """

    def __init__(
        self,
        model: nn.Module,
        counting: dict[nn.Module, str],
        put_back: Callable[[], None],
        fewest: bool = False,
        budget: Budget | None = None,
    ):
        self.found: list[Part] = []
        self.refused: list[Refused] = []
        self.left_out = 0
        self._model, self._put_back, self._counting = model, put_back, counting
        self._fewest, self._total = fewest, budget or Budget()
        self._paths = {module: path for path, module in model.named_modules() if path}

    def search(
        self,
        call: ExampleCall,
        cheap: ExampleCall | None = None,
        is_captured: bool = False,
        entries: frozenset[nn.Module] = frozenset(),
        seconds: float = math.inf,
    ) -> None:
        """Search for parts that serve ``call`` of the model, or of one of its methods.

        Args:
            cheap: an optional call of the same form with smaller sizes, used for traces.
            is_captured: whether the model itself was captured for this call. Then its parts only serve other methods,
                and calls that its guard refuses. Only repeated blocks without most of the model's parameters qualify:
                the guard of a larger block would miss whenever the model's does.
            entries: the modules that other methods call, which always qualify.
            seconds: processor time for these captures.
        """
        model, before = self._model, len(self.found)
        self._budget = Budget(min(seconds, self._total.left()))
        base, traced = _base(model, call, cheap, self._paths, self._put_back)
        received = traced if base is call else outlines(model, call, self._paths)
        self._varied = _varied(model, base, self._paths, self._put_back, images=not self._fewest)
        # Modules with different inputs need different graphs or memory layouts.
        alike = groups(traced, lambda each: (kind_of(traced[each]), each in received and kind_of(received[each])))
        self._groups = {module: group for group in alike for module in group}
        self._done = self._served(call)
        wanted = [
            group
            for group in alike
            if not self._done.issuperset(group)
            and (not is_captured or _is_block(group, model) or not entries.isdisjoint(group))
        ]
        plain = [group[0] for group in wanted if self._is_plain(group, traced[group[0]])]
        self._calls = observe(model, base, plain, traced)
        # The inputs of these modules in the example call itself, as the traced call may be wider.
        self._examples = self._calls if base is call else observe(model, call, plain, received)
        self._captured: dict[nn.Module, Part | None] = {}
        self._method = call.method
        self._search(seconds_within(model, call), is_captured)
        self.found[before:] = self._in_order(self._without_singles(self.found[before:]))

    def _served(self, call: ExampleCall) -> set[nn.Module]:
        """The modules with captures that accept their first inputs in ``call``, and all their submodules."""
        found = [captured for part in self.found for captured in part.captures]
        received = observe(self._model, call, {captured.module for captured in found}) if found else {}
        served = (c.module for c in found if c.module in received and c.taken(received[c.module]) is not None)
        return {inner for module in served for inner in module.modules()}

    def _is_plain(self, group: list[nn.Module], call: ExampleCall) -> bool:
        kind = opaque_kind((call.args, call.kwargs))
        error = None if kind is None else CaptureError(f"it receives a {kind}")
        for module in group:
            if module in self._counting:
                error = CaptureError(self._counting[module])
        if error is not None:
            self.refused.append(Refused(self._paths[group[0]], error))
        return error is None

    def _search(self, seconds: Mapping[nn.Module, float], is_captured: bool) -> None:
        """Try the submodules in the order of their ``seconds``."""
        late = set[nn.Module]()
        numbers = count()  # tie-breakers, as modules cannot be compared
        # Each with whether it, or a module around it, was captured.
        waiting = [(0.0, next(numbers), self._model, is_captured)]
        while waiting:
            *_, module, inside = heapq.heappop(waiting)
            if module in self._done:
                continue
            group = self._groups.get(module)
            if group is not None and group[0] in self._calls and not (inside and is_operator(module)):
                if module not in self._captured and self._budget.left() < LEAST_SECONDS:
                    if group[0] not in late and not is_captured:
                        late.add(group[0])
                        self.left_out += len(group)
                        reason = f"no time was left for it: captures may take {self._budget.seconds:.0f} s"
                        self.refused.append(Refused(self._paths[module], CaptureError(reason)))
                    continue
                if module not in self._captured:
                    self._capture(group)
                part = self._captured[module]
                if part is not None:
                    if part.captures[0].module is not module or part not in self.found or self._fewest:
                        continue
                    inside = True
            for child in module.children():
                heapq.heappush(waiting, (-seconds.get(child, 0.0), next(numbers), child, inside))

    def _without_singles(self, found: list[Part]) -> list[Part]:
        """``found`` without single operators inside other parts: they were captured only because the same operator
        occurs elsewhere."""
        paths = {captured.path for part in found for captured in part.captures}
        for part in found:
            if is_operator(part.captures[0].module):
                part.captures = [c for c in part.captures if paths.isdisjoint(parents(c.path))]
        return [part for part in found if part.captures]

    def _in_order(self, found: list[Part]) -> list[Part]:
        order = {path: index for index, path in enumerate(self._paths.values())}
        return sorted(found, key=lambda part: order[part.captures[0].path])

    def _capture(self, group: list[nn.Module]) -> None:
        """Capture the first of ``group``. The modules in which the integers that its trace read are equal share its
        graph. Then capture the first of the others in the same way."""
        call, waiting = self._calls[group[0]], group
        example = self._examples.get(group[0], call)  # the example call may not reach it
        varied = {name: calls.get(group[0]) for name, calls in self._varied.items()}
        while waiting:
            first, path = waiting[0], self._paths[waiting[0]]
            patience = min(PATIENCE, 2 / 3 * self._budget.left())  # the rest is for another choice of free sizes
            try:
                free = choices(first, call, varied)
                captured = capture(first, path, call, free, example, self._budget, patience)
            except CaptureError as error:
                self.refused.append(Refused(path, error))
                self._captured.update(dict.fromkeys(waiting))
                return
            reads = captured.region.reads
            sharing = [module for module in waiting if integers(module, reads) == integers(first, reads)]
            others = [captured.alike(self._paths[module], module) for module in sharing[1:]]
            part = Part([captured, *others], self._method)
            self._captured.update(dict.fromkeys(sharing, part))
            if captured.findings.matches:
                self.found.append(part)
            waiting = [module for module in waiting if module not in sharing]


def _base(
    model: nn.Module,
    call: ExampleCall,
    cheap: ExampleCall | None,
    modules: Iterable[nn.Module],
    put_back: Callable[[], None],
) -> tuple[ExampleCall, dict[nn.Module, ExampleCall]]:
    """Return the call to trace with, with free sizes of at least 2 if supported, and its inner calls."""
    for wide in ([] if cheap is None else [widened(cheap)]) + [widened(call)]:
        if wide is call:
            break
        try:
            with bounded_lookups(wide.tensors()):
                return wide, outlines(model, wide, modules)
        except Exception:  # the model supports no other batch or sequence: keep the call
            continue
        finally:
            put_back()
    return call, outlines(model, call, modules)


def _varied(
    model: nn.Module, base: ExampleCall, modules: Iterable[nn.Module], put_back: Callable[[], None], images: bool
) -> dict[str, dict[nn.Module, ExampleCall]]:
    """The inputs of the modules when one input size differs, for each size that can vary, including the size of
    ``images`` if requested."""
    found = {}
    for name, call in variations(base).items():
        if name == "image" and not images:
            continue
        try:
            with bounded_lookups(call.tensors()):
                found[name] = outlines(model, call, modules)
        except Exception:  # this size is fixed
            continue
        finally:
            put_back()
    return found


def choices(
    module: nn.Module, call: ExampleCall, varied: Mapping[str, ExampleCall | None]
) -> list[dict[str, Dimensions]]:
    """Free sizes to trace with: all varied sizes, sizes that vary with the batch, none."""
    form = call_form(module, call)
    histories: dict[tuple[tuple[str, int], ...], Dimensions] = {}
    known = sizes(form.leaves(call.args, call.kwargs))
    others = {name: other and form.leaves(other.args, other.kwargs) for name, other in varied.items()}
    others = {name: sizes(leaves) for name, leaves in others.items() if leaves is not None}
    for index, shape in enumerate(known):
        for dimension, size in enumerate(shape or ()):
            history = [(name, _size_at(shapes[index], dimension)) for name, shapes in others.items()]
            changes = tuple((name, other) for name, other in history if other not in (None, size))
            if changes:
                histories.setdefault((("", size), *changes), []).append((index, dimension))
    named: dict[str, Dimensions] = {}
    for (_, (name, _), *_), dimensions in histories.items():
        count = sum(known == name or known.startswith(f"{name} ") for known in named)
        named[f"{name} {count + 1}" if count else name] = dimensions
    batch = {name: dimensions for name, dimensions in named.items() if name.split()[0] == "batch"}
    return [choice for choice in (named, batch) if choice] + [{}]


def _size_at(shape: tuple[int, ...] | None, dimension: int) -> int | None:
    return shape[dimension] if shape is not None and dimension < len(shape) else None


def parents(path: str) -> list[str]:
    """The dotted paths of all modules around the one at ``path``, except the model itself."""
    pieces = path.split(".")
    return [".".join(pieces[:count]) for count in range(1, len(pieces))]


def _is_block(group: list[nn.Module], model: nn.Module) -> bool:
    return len(group) > 1 and 2 * _count(group[0]) <= _count(model) and not is_operator(group[0])


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
