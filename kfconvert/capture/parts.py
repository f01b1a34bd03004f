"""The submodules of a model that are captured on their own: which they are, and which of their sizes are free.

They serve where the model as a whole cannot be captured (a key-value cache, lists of images, control flow on data),
and where it was, but a call does not pass its guard.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs import CallForm, ExampleCall, bounded_lookups, variations, widened
from ..region import CaptureError, Dimensions, given_as
from .captured import Capture, capture
from .own_writes import Change
from .structure import by_integers, groups, integers, is_operator, unread
from .submodule_calls import irregular, observe, opaque_kind, sizes
from .trial_runs import is_faithful

# In seconds of processor time of this thread: counted by the clock, fewer parts would be found on a busy machine.
LEAST_SECONDS_WITHIN = 3.0
# In such seconds, for one choice of free sizes: where many sizes are free, the capture of windowed attention takes
# minutes.
PATIENCE = 8.0


@dataclass
class Part:
    """Submodules of one structure, captured by one graph: that of the traced module first, then the others."""

    captures: list[Capture]


@dataclass(frozen=True)
class Refused:
    """A submodule that could not be captured, and why."""

    path: str
    error: CaptureError


class Parts:
    """The search for parts, from the largest submodules down.

    Args:
        counting: modules that change an attribute, which no graph does, each with what it changes.
        put_back: gives the model the state that it had after the example call: one that keeps something of its inputs'
            sizes may take no others after a call with these.
        cheap: a call of the same form with smaller sizes, if there is one, to trace with.
        whole: the seconds that it took to capture the model itself, None where it could not be. Where it was, only
            blocks that occur more than once are looked for, and none with most of the model's parameters: its guard
            would miss whenever the model's does. Parts within a captured module only serve calls that its guard
            refuses. Their search may take half the time of the captures around them; parts for which no time is left
            are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ExampleCall,
        counting: dict[nn.Module, Change],
        put_back: Callable[[], None],
        cheap: ExampleCall | None = None,
        whole: float | None = None,
    ):
        self.found: list[Part] = []
        self.refused: list[Refused] = []
        self.left_out = 0  # submodules that there was no time to look at
        self._paths = {module: path for path, module in model.named_modules() if path}
        base, outlines = _base(model, call, cheap, self._paths, put_back)
        self._varied = _varied(model, base, self._paths, put_back)
        alike = groups(outlines, lambda module: _kinds(outlines[module]))
        self._groups = {module: group for group in alike for module in group}
        self._counting = counting
        self._irregular = irregular(model, base)
        blocks = [group for group in alike if whole is None or _is_block(group, model)]
        wanted = [group[0] for group in blocks if self._is_plain(group, outlines[group[0]])]
        self._calls = observe(model, base, wanted, values=True)
        # What these modules receive in the example call itself, as the traced call may be a wider one.
        self._examples = self._calls if base is call else observe(model, call, wanted, values=True)
        self._captured: dict[nn.Module, Part | None] = {}
        self._search(model, whole)
        self._leave_out_singles()

    def _is_plain(self, group: list[nn.Module], call: ExampleCall) -> bool:
        kind = opaque_kind((call.args, call.kwargs))
        error = CaptureError(f"it receives a {kind}") if kind is not None else None
        for module in group:
            if module in self._counting:
                error = self._counting[module].error()
            elif module in self._irregular:
                error = CaptureError(self._irregular[module])
        if error is not None:
            self.refused.append(Refused(self._paths[group[0]], error))
        return error is None

    def _search(self, model: nn.Module, whole: float | None) -> None:
        """Look at the submodules of ``model``, level by level."""
        around, within = whole or 0.0, 0.0  # seconds spent
        late: set[nn.Module] = set()
        waiting = deque([(model, whole is not None)])
        while waiting:
            module, inside = waiting.popleft()  # inside: whether it, or a module around it, was captured
            for child in module.children():
                group = self._groups.get(child)
                if group is None or group[0] not in self._calls or (inside and is_operator(child)):
                    waiting.append((child, inside))
                    continue
                if child not in self._captured:
                    left = max(LEAST_SECONDS_WITHIN, around / 2) - within
                    if inside and left < 0:
                        if group[0] not in late:
                            self.left_out += len(group)
                            error = CaptureError(f"the search for parts within others ended after {within:.1f} s")
                            self.refused.append(Refused(self._paths[child], error))
                            late.add(group[0])
                        continue
                    start = time.thread_time()
                    self._capture(group, min(PATIENCE, max(LEAST_SECONDS_WITHIN, left)) if inside else PATIENCE)
                    seconds = time.thread_time() - start
                    around, within = (around, within + seconds) if inside else (around + seconds, within)
                part = self._captured[child]
                if part is None:
                    waiting.append((child, inside))
                elif part.captures[0].module is child and part in self.found:
                    waiting.append((child, True))

    def _leave_out_singles(self) -> None:
        """Drop single operators that lie within other parts: they were captured only because operators of the same
        structure stand elsewhere. Then bring the parts into the order of the model."""
        paths = {captured.path for part in self.found for captured in part.captures}
        for part in self.found:
            if is_operator(part.captures[0].module):
                part.captures = [c for c in part.captures if paths.isdisjoint(parents(c.path))]
        order = {path: index for index, path in enumerate(self._paths.values())}
        remaining = [part for part in self.found if part.captures]
        self.found = sorted(remaining, key=lambda part: order[part.captures[0].path])

    def _capture(self, group: list[nn.Module], patience: float) -> None:
        used: set[str] = set()
        try:
            with unread(group, used.add):
                part = self._capture_alike(group, group[0], patience)
            if self._is_faithful(part):
                return self._take(part)
            # Otherwise the modules use integers in which they differ in a way that ``unread`` cannot see, such as
            # isinstance.
        except CaptureError as error:
            if not used:
                return self._refuse(group, error)
        for subgroup in by_integers(group):
            try:
                self._take(self._capture_alike(subgroup, group[0], patience))
            except CaptureError as error:
                self._refuse(subgroup, error)

    def _capture_alike(self, group: list[nn.Module], observed: nn.Module, patience: float) -> Part:
        """Capture the first of ``group`` with the call that ``observed``, of the same structure, received."""
        first, call = group[0], self._calls[observed]
        free = choices(first, call, {name: calls.get(observed) for name, calls in self._varied.items()})
        example = self._examples.get(observed, call)  # the example call itself may not reach it
        captured = capture(first, self._paths[first], call, free, example, patience)
        others = [captured.alike(self._paths[module], module) for module in group[1:]]
        return Part([captured, *others])

    def _take(self, part: Part) -> None:
        self._captured.update(dict.fromkeys((captured.module for captured in part.captures), part))
        if part.captures[0].findings.matches:
            self.found.append(part)

    def _refuse(self, group: list[nn.Module], error: CaptureError) -> None:
        self.refused.append(Refused(self._paths[group[0]], error))
        self._captured.update(dict.fromkeys(group))

    def _is_faithful(self, part: Part) -> bool:
        """Whether the graph, traced without the integers in which its modules differ, is right for all of them."""
        kinds = {tuple(integers(captured.module).items()): captured for captured in part.captures}
        if len(kinds) == 1:
            return True
        first = part.captures[0]
        call = self._calls[first.module]
        leaves = first.region.call.leaves(call.args, call.kwargs)
        return all(is_faithful(c.module, c.region, c.variant(()).run, leaves) for c in kinds.values())


def _base(
    model: nn.Module,
    call: ExampleCall,
    cheap: ExampleCall | None,
    modules: Iterable[nn.Module],
    put_back: Callable[[], None],
) -> tuple[ExampleCall, dict[nn.Module, ExampleCall]]:
    """The call to trace with, whose free sizes are at least 2 where the model takes that, and what it hands on."""
    for wide in ([] if cheap is None else [widened(cheap)]) + [widened(call)]:
        if wide is call:
            break
        try:
            with bounded_lookups(wide.tensors()):
                return wide, observe(model, wide, modules, values=False)
        except Exception:  # the model takes no other batch or sequence: the call as it is remains
            continue
        finally:
            put_back()
    return call, observe(model, call, modules, values=False)


def _varied(
    model: nn.Module, base: ExampleCall, modules: Iterable[nn.Module], put_back: Callable[[], None]
) -> dict[str, dict[nn.Module, ExampleCall]]:
    """What the modules receive when one size of the input is another, for each size that the model lets vary."""
    found = {}
    for name, call in variations(base).items():
        try:
            with bounded_lookups(call.tensors()):
                found[name] = observe(model, call, modules, values=False)
        except Exception:  # this size is fixed
            continue
        finally:
            put_back()
    return found


def choices(
    module: nn.Module, call: ExampleCall, varied: Mapping[str, ExampleCall | None]
) -> list[dict[str, Dimensions]]:
    """Free sizes to trace with: all that varied, those that varied with the batch, none."""
    try:
        form = CallForm(module.forward, call.args, call.kwargs)
    except ValueError as error:
        raise CaptureError(str(error)) from None
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


def _kinds(call: ExampleCall) -> Hashable:
    """The structure of the arguments, the ranks and dtypes of tensors, which of those are one, the values of flags."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    kinds = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dim(), leaf.dtype))
        else:
            kinds.append(leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf))
    return repr(spec), tuple(kinds), given_as([leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _size_at(shape: tuple[int, ...] | None, dimension: int) -> int | None:
    return shape[dimension] if shape is not None and dimension < len(shape) else None


def parents(path: str) -> list[str]:
    """The dotted paths of all modules around the one at ``path``, but for the model itself."""
    pieces = path.split(".")
    return [".".join(pieces[:count]) for count in range(1, len(pieces))]


def _is_block(group: list[nn.Module], model: nn.Module) -> bool:
    return len(group) > 1 and 2 * _count(group[0]) <= _count(model) and not is_operator(group[0])


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
