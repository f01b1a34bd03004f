"""One captured call form of one module: traced, brought to canonical form, and checked against its own inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..accuracy import is_same_tensor
from ..canonical import canonicalise
from ..graph import mark_weights
from ..inputs import ExampleCall, Unstorable
from ..matching import Findings, Site, rewrite
from ..modules import CHANNELS_LAST, joined
from ..patterns import search
from ..region import CaptureError, Dimensions, LiveTensors, Region
from ..runtime import (
    Program,
    Variant,
    default_device,
    global_hook,
    has_hooks,
    inner_hook,
    recorded_reads,
    remedy,
)
from ..torch_state import without_autocast
from .alike_layers import Stack, shortened, stacks_of
from .argument_trials import check_arguments
from .deadline import Budget
from .layer_runs import run_alike
from .repetition import repeat
from .tracer import is_final, trace
from .trial_runs import (
    admit_same_tensors,
    admit_sizes_of_one,
    check_collectives,
    check_other_sizes,
    check_outputs,
    draws_alike,
    ignore_use_cache,
    note_orders,
    take_constants,
    trial,
)

LAST_PATIENCE = 4


@dataclass
class Capture:
    """A captured module of the model (``path`` is "" for the model itself).

    ``leaves`` are the flat inputs of an example call of the module, ``findings`` the matches of the patterns in it;
    ``left_out`` are excluded sites, for which there is no decision.
    """

    path: str
    module: nn.Module
    region: Region
    live: LiveTensors
    leaves: list[Any]
    findings: Findings
    sites: list[Site] = field(default_factory=list)
    left_out: list[Site] = field(default_factory=list)
    channels_last: bool = False
    _last: tuple[Hashable, Variant | None] = field(default=(None, None), init=False)

    @property
    def found(self) -> list[Site]:
        """The candidate sites and the excluded sites."""
        return [*self.sites, *self.left_out]

    @property
    def applied(self) -> list[Site]:
        return [site for site in self.sites if site.status == "applied"]

    def taken(self, call: ExampleCall) -> list[Any] | None:
        """Return the flat inputs of ``call`` if the region accepts them, else None."""
        leaves = self.region.call.leaves(call.args, call.kwargs)
        return leaves if leaves is not None and self.region.guard.refusal(leaves) is None else None

    def variant(self, sites: Sequence[Site]) -> Variant:
        """Return the program with the modules of ``sites``. If it equals the last one, returns that one."""
        applied = tuple((id(site), site.replacement.module.strategy) for site in sites)
        key = self.channels_last, self.region.has_fixed_layouts, applied
        known, variant = self._last
        if variant is None or known != key:
            program = rewrite(self.region, sites, self.live, self.channels_last, join=joined)
            channels_last = any(map(_is_channels_last, self.leaves))
            variant = Variant(self.region, program, program.memory_formats(self.leaves) if channels_last else ())
            variant.strides = program.strides(self.leaves)
            self._last = key, variant
        return variant

    def run_graph(self, leaves: list[Any], passed: Sequence[Any] = ()) -> Any:
        """Return the outputs of the graph, and write to the ``passed`` caches. For a single call, this takes less time
        than a program, whose code must be compiled."""
        with without_autocast():
            outputs = fx.Interpreter(self.region.root, graph=self.region.graph).run(*self.live.arguments(leaves))
        return self.region.outputs.put_together(outputs, passed)

    def plain_program(self) -> Program:
        """Return the program without plans."""
        return rewrite(self.region, (), self.live, once=False)

    def alike(self, path: str, module: nn.Module) -> Capture:
        """Return the capture of another module of the same structure: the same graph over that module's tensors."""
        live = LiveTensors(module, self.region)
        return replace(self, path=path, module=module, live=live, sites=[], left_out=[])


def capture(
    module: nn.Module,
    path: str,
    call: ExampleCall,
    choices: Sequence[Mapping[str, Dimensions]],
    example: ExampleCall | None = None,
    budget: Budget | None = None,
    patience: float = math.inf,
) -> Capture:
    """Capture ``module`` as called in ``call``, with the first of the ``choices`` of free sizes that works.

    Args:
        example: the call whose inputs the capture keeps; it must pass the guard. ``call`` by default.
        budget: the processor time for all choices together; unlimited by default.
        patience: seconds of processor time before the next choice is tried. The last choice gets ``LAST_PATIENCE``
            times as many.

    Raises:
        CaptureError: no choice works; the reason is the first one's.
    """
    hook = inner_hook(module) or global_hook()
    if hook is not None:
        raise CaptureError(hook)
    if has_hooks(module):
        # The trace would make the hooks part of the program. The program replaces only forward, so __call__ would run
        # them again.
        raise CaptureError(f"{path or 'the model'} has hooks, which would be called twice{remedy(module)}")
    if not _calls_forward_alone(module, call):
        raise CaptureError(f"{path or 'the model'} overrides __call__, which would run twice")
    training = next((name for name, inner in module.named_modules() if inner.training), None)
    if training is not None:
        # The model's own train() or eval() may cause this. Programs serve eval mode only, not mixed modes.
        name = f"{path}.{training}".strip(".") or "the model"
        raise CaptureError(f"{name} stays in train mode after eval()")
    sparse = _sparse_tensor(module, call)
    if sparse is not None:
        raise CaptureError(f"{sparse} is a sparse tensor")
    reason: CaptureError | None = None
    distinct = [dimensions for index, dimensions in enumerate(choices) if dimensions not in choices[:index]]
    budget = budget or Budget()
    for dimensions in distinct:
        left = budget.left()
        if reason is not None and (is_final(reason) or left <= 0):
            break
        seconds = min(left, patience if dimensions is not distinct[-1] else LAST_PATIENCE * patience)
        try:
            captured = _capture(module, path, call, dimensions, example or call, seconds)
        except CaptureError as error:
            reason = reason or error
            continue
        except Exception as error:
            reason = reason or _unforeseen(error)
            continue
        refusal = captured.region.guard.refusal(captured.leaves)
        if refusal is None:
            return captured
        reason = reason or CaptureError(refusal)
    assert reason is not None  # at least one choice was tried
    raise reason


def recaptured(module: nn.Module, path: str, region: Region, leaves: list[Any] | None) -> Capture:
    """Return the capture of ``module`` by ``region``, which was stored for a module like it.

    Raises:
        Unstorable: the region does not fit this module or these flat inputs.
    """
    if leaves is None or len(leaves) != len(region.inputs) or region.guard.refusal(leaves) is not None:
        raise Unstorable("its example call differs from the stored ones")
    reason = unfit_tensor(module, region)
    if reason is not None:
        raise Unstorable(reason)
    return Capture(path, module, region, _mark(module, region), leaves, search(region.graph))


def unfit_tensor(module: nn.Module, region: Region) -> str | None:
    """Return the tensor of ``module`` whose shape, dtype or kind of device differs from the graph of ``region``; None
    where all are equal."""
    live = LiveTensors(module, region)
    for node in region.graph.nodes:
        if node.name not in region.slots:
            continue
        expected: Any = node.meta.get("val")
        try:
            found: Any = live.tensor(node)
        except (AttributeError, KeyError):
            found = None
        if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
            return f"it has no tensor for {node.name}"
        if (found.shape, found.dtype, found.device.type) != (expected.shape, expected.dtype, expected.device.type):
            return f"its tensor for {node.name} has another shape, dtype or device"
    return None


def _mark(module: nn.Module, region: Region) -> LiveTensors:
    """Annotate the placeholders for tensors of the model with these tensors, which are returned."""
    parameters = {n for n, (at, key) in region.slots.items() if key in module.get_submodule(at)._parameters}
    live = LiveTensors(module, region)
    names = region.slots.keys() | region.constants.keys()
    held = {node.name: type(live.tensor(node)) for node in region.graph.nodes if node.name in names}
    classes = {name: kind for name, kind in held.items() if kind not in (Tensor, nn.Parameter)}
    mark_weights(region.graph, names, parameters, classes)
    return live


def attempted(make: Callable[[], Capture]) -> Capture | CaptureError:
    """Return the capture that ``make`` returns, or the reason why it raises an error."""
    try:
        return make()
    except CaptureError as error:
        return error
    except Exception as error:
        return _unforeseen(error)


def _unforeseen(error: Exception) -> CaptureError:
    """The error for an unexpected exception, such as an error that a model's values raise when pytree flattens or
    rebuilds them."""
    return CaptureError(f"it cannot be captured: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")


def _sparse_tensor(module: nn.Module, call: ExampleCall) -> str | None:
    """The name of a tensor without strides in the module or among its arguments; None where there is none."""
    held = [(name, value) for each in module.modules() for name, value in vars(each).items()]
    named = [*module.named_parameters(), *module.named_buffers(), *held]
    named += [("an argument", tensor) for tensor in call.tensors()]
    return next((name for name, t in named if isinstance(t, Tensor) and t.layout is not torch.strided), None)


def _is_channels_last(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dim() not in CHANNELS_LAST or leaf.is_contiguous():
        return False
    return leaf.is_contiguous(memory_format=CHANNELS_LAST[leaf.dim()])


@torch.no_grad()
def _calls_forward_alone(module: nn.Module, call: ExampleCall) -> bool:
    """Whether a call of ``module`` returns the result of its forward, since a program replaces only the forward. A
    class may override ``__call__``, as transformers does for training."""
    own = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    if not any("__call__" in vars(base) for base in own):
        return True
    given = call.copied(), call.copied()
    try:
        outputs, direct = module(*given[0].args, **given[0].kwargs), module.forward(*given[1].args, **given[1].kwargs)
    except Exception:  # a forward that is never called directly may raise anything
        return False
    (ours, spec), (theirs, other) = pytree.tree_flatten(outputs), pytree.tree_flatten(direct)
    return spec == other and all(map(_is_same, ours, theirs))


def _is_same(value: Any, other: Any) -> bool:
    return is_same_tensor(value, other) if isinstance(value, Tensor) and isinstance(other, Tensor) else value == other


@torch.no_grad()
def _capture(
    module: nn.Module,
    path: str,
    call: ExampleCall,
    dimensions: Mapping[str, Dimensions],
    example: ExampleCall,
    seconds: float,
) -> Capture:
    if stacks := stacks_of(module):
        with suppress(Exception):  # the code may expect all layers, or treat a later one in another way
            with recorded_reads(module) as reads:
                stacks = run_alike(module, call, stacks)
            if stacks:
                region = trace(module, call, dimensions, seconds, stacks)
                region.reads |= reads
                return _checked(module, path, call, region, example, stacks)
    return _checked(module, path, call, trace(module, call, dimensions, seconds), example)


def _checked(
    module: nn.Module, path: str, call: ExampleCall, region: Region, example: ExampleCall, stacks: Sequence[Stack] = ()
) -> Capture:
    """The capture by ``region``. With ``stacks``, which it has in part, their first layers are checked in detail, and
    the repeated ones by the outputs of one call."""
    given, leaves = (region.call.leaves(c.args, c.kwargs) for c in (call, example))
    if leaves is None:
        raise CaptureError("its example call and the traced call have different forms")
    with shortened(module, stacks):
        live = _mark(module, region)
        region.note_default_device(default_device())
        with without_autocast():
            canonicalise(region.graph)
        take_constants(module, region, given)
        note_orders(module, region, leaves)
        captured = Capture(path, module, region, live, leaves, Findings())
        _check(module, region, captured.variant(()).run, given, leaves)
    if stacks:
        repeat(region, stacks)
        captured = Capture(path, module, region, _mark(module, region), leaves, Findings())
        check_outputs(region, captured.run_graph, trial(module, region, given))
    with without_autocast():  # user patterns are traced
        captured.findings = search(region.graph)
    return captured


def _check(module: nn.Module, region: Region, run: Callable[..., Any], given: list[Any], leaves: list[Any]) -> None:
    """Compares ``run``, the graph of ``region``, with ``module``, and notes for which other calls it is right."""
    seen = trial(module, region, given)
    if seen is not None and seen.refusal is not None:
        raise CaptureError(seen.refusal)
    if region.is_random and not draws_alike(module, region, run, given):
        raise CaptureError("its random numbers do not depend on the state of the generator alone")
    check_outputs(region, run, seen)
    check_other_sizes(module, region, run, given)
    check_arguments(module, region, run, seen)
    check_collectives(module, region, run, given)
    admit_same_tensors(module, region, run, leaves)
    admit_sizes_of_one(module, region, run, given)
    ignore_use_cache(module, region, run, given)
