"""Trial runs that compare a captured graph with its module, and find further calls for which it is right. Callers
disable gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..accuracy import are_close, seeded
from ..graph import mark_orders
from ..inputs import TreeForm, bounded_lookups, copy_of, taken_apart
from ..modules import CHANNELS_LAST
from ..process import is_one_of_several, noted_collectives
from ..region import CaptureError, Dimensions, Region, given_as
from ..runtime import configurations
from ..torch_state import is_transformed

# Both sides run the same operators, possibly with different algorithms. A wrong branch differs grossly.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

FEW = 8
# The first of the free sizes has so many entries in further trial runs, the second one more, and so on.
_FURTHER = 2


def admit_sizes_of_one(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Let each free size of ``region`` be 1 where ``run``, its graph as traced, then agrees with ``model``.

    The tracer assumes free sizes of at least 2. ``leaves``: flat user inputs of the region, to be cut to 1. The other
    sizes have several values in turn, since the code may branch on both.
    """
    guard, free = region.guard, region.guard.free
    small = [_resized(region, with_few(region, leaves)), *_further(region, leaves)]

    def agrees(names: Collection[str]) -> bool:
        ones = [place for name in names for place in free[name]]
        found = [_agrees(model, region, run, _cut(given, ones, 1)) for given in small]
        if all(each is None for each in found):  # some models only support the original sizes
            found = [_agrees(model, region, run, _cut(_resized(region, leaves), ones, 1))]
        return False not in found and True in found

    safe = [name for name in free if agrees([name])]
    if len(safe) < 2 or agrees(safe):
        for name in safe:
            guard.admit_one(name)


def admit_same_tensors(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Let arguments that are one tensor among ``leaves`` be one tensor in later calls too, where ``run``, traced with
    separate tensors, agrees with ``model``, whose code may compare their identity."""
    given = given_as([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if len(set(given)) < len(given) and is_faithful(model, region, run, leaves):
        region.guard.admit_one_for_several(leaves)


def draws_alike(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> bool:
    """Whether ``run`` and ``model`` draw the same random numbers for any generator state, and leave the same state. A
    forward that seeds or restores the generators does not pass: no graph records that."""

    def drawn(function: Callable[..., Any], seed: int) -> tuple[list[Any], list[bool]]:
        with seeded(seed, leaves):
            before = _generator_states(leaves)
            outputs = region.flat_outputs(function, leaves)[0]
            return outputs, [not torch.equal(*states) for states in zip(before, _generator_states(leaves))]

    def agrees(seed: int) -> bool:
        (expected, moved), (actual, also) = (drawn(each, seed) for each in (model, called_by_names(region, run)))
        return moved == also and are_close(expected, actual, TOLERANCES, share=0.01)

    return agrees(0) and agrees(1)


def _generator_states(leaves: list[Any]) -> list[Tensor]:
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


class _Given(TorchFunctionMode):
    """Context manager whose ``tensors`` collects the parameters and other tensors that torch functions receive, by the
    address of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[tuple[Any, ...], Tensor] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        for value in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and _place_of(value) is not None:
                known = self.tensors.setdefault(_place_of(value), value)
                if isinstance(value, nn.Parameter) and not isinstance(known, nn.Parameter):
                    self.tensors[_place_of(value)] = value
        return function(*args, **(kwargs or {}))


def _place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    if tensor.layout is not torch.strided or is_transformed(tensor):
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def take_constants(model: nn.Module, region: Region, leaves: list[Any]) -> None:
    """Replace the constants of ``region``, which the tracer has copied, by the tensors that ``model`` reads, so that
    writes to these change the watched versions.

    Raises:
        CaptureError: a constant is a parameter that is not registered in ``model``: its replacement, or a change of its
            ``requires_grad``, would go undetected.
    """
    if not region.constants:
        return
    with _Given() as given:
        model(**region.call.keywords(leaves))
    for name, constant in region.constants.items():
        found = given.tensors.get(_place_of(constant))
        if isinstance(found, nn.Parameter):
            sizes = list(found.shape)
            raise CaptureError(f"it reads a parameter of shape {sizes} that is not registered in a module")
        if found is not None and type(found) is type(constant):
            region.constants[name] = found


@dataclass(frozen=True)
class Trial:
    """The results of a module for the flat inputs ``leaves``, as flat values and their form; and the reason why no
    graph has all of them, None if one may."""

    leaves: list[Any]
    outputs: list[Any]
    form: TreeForm
    refusal: str | None


def trial(model: nn.Module, region: Region, leaves: list[Any]) -> Trial | None:
    """Return a call of ``model`` with a few entries in each free size of ``region``, or with the sizes of ``leaves``
    where the guard or the model does not support that; None where the model supports neither."""
    for few in (with_few(region, leaves), leaves) if region.guard.free else (leaves,):
        given = _resized(region, few)
        if few is not leaves and region.guard.refusal(given) is not None:
            continue
        with suppress(Exception):  # the model does not support these sizes
            keywords, tensors = region.call.keywords(given), [leaf for leaf in given if isinstance(leaf, Tensor)]
            passed, before = region.call.passed((), keywords), pytree.tree_flatten(keywords)
            plain = [tensor for tensor in tensors if not tensor.requires_grad]
            with bounded_lookups(tensors):
                returned = model(**keywords)
            (outputs, form), after = taken_apart(returned, passed), pytree.tree_flatten(keywords)
            attribute = _attribute_of(returned)
            refusal = None if attribute is None else f"its output has the attribute {attribute}"
            if before[1] != after[1] or not all(map(operator.is_, before[0], after[0])):
                refusal = "its forward writes to a list or dict among its arguments"
            for tensor in plain:
                if tensor.requires_grad:
                    refusal = "its forward sets requires_grad of an argument"
                    tensor.requires_grad_(False)
            return Trial(given, outputs, form, refusal)
    return None


def note_orders(model: nn.Module, region: Region, leaves: list[Any]) -> None:
    """Record the memory layout of the outputs of ``model`` for the example ``leaves`` where the graph of ``region`` has
    another one. For a size of 1, operators may choose another layout than in the trace."""
    leaves = [copy_of(each) if isinstance(each, Tensor) else each for each in leaves]
    with suppress(Exception):
        mark_orders(region.graph, region.flat_outputs(model, leaves)[0])


def check_outputs(region: Region, run: Callable[[list[Any]], Any], seen: Trial | None) -> None:
    """Compare ``run``, the graph of ``region`` over the tensors of its model, with the outputs of the model in
    ``seen``. Code may behave differently for a trace's stand-ins, whose identity, attributes and sizes differ from the
    real tensors'.

    Raises:
        CaptureError: they differ by more than rounding.
    """
    if seen is None or region.is_random:  # see draws_alike
        return
    # A step on a static cache writes to it.
    leaves = [copy_of(each) if isinstance(each, Tensor) else each for each in seen.leaves]
    reason = "its graph and its forward compute different outputs; the code may behave differently in a trace"
    try:
        with bounded_lookups(leaves):
            outputs, form = region.flat_outputs(called_by_names(region, run), leaves)
    except Exception as error:
        raise CaptureError(reason) from error
    if form != seen.form or not are_close(seen.outputs, outputs, TOLERANCES):
        raise CaptureError(reason)
    given = set(map(id, seen.leaves))
    if not all(_is_of_one_kind(*each) for each in zip(seen.outputs, outputs) if id(each[0]) not in given):
        raise CaptureError("it makes an output a parameter or sets its requires_grad, which a graph does not record")


def check_other_sizes(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Compare ``run``, the graph of ``region``, with ``model`` for other values of its free sizes.

    Code may use a size in ways for which the tracer adds no guard, such as text made from it.

    Raises:
        CaptureError: they differ by more than rounding.
    """
    for given in () if region.is_random else _further(region, leaves):
        if region.guard.refusal(given) is None and _agrees(model, region, run, given) is False:
            raise CaptureError("its graph and its forward compute different outputs for other sizes of its inputs")


def _further(region: Region, leaves: list[Any]) -> list[list[Any]]:
    """``leaves`` with small values of the free sizes, and with values larger than those of ``leaves``. Empty for one
    free size, such as the number of images, whose runs are expensive."""
    found = []
    for larger in (False, True) if len(region.guard.free) > 1 else ():
        sized = list(leaves)
        for number, places in enumerate(region.guard.free.values()):
            index, dimension = places[0]
            size = leaves[index].shape[dimension]
            sized = _sized(sized, places, min(size, FEW) + 1 if larger else _FURTHER + number)
        found.append(sized)
    return found


def _is_of_one_kind(value: Any, other: Any) -> bool:
    """Whether two tensors have the same class and the same autograd properties."""
    if value is other or not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return True
    if type(value) is not type(other) or value.requires_grad != other.requires_grad:
        return False
    return not value.is_leaf or (value.grad is None) == (other.grad is None)


def check_collectives(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Raises CaptureError where ``run``, the graph of ``region``, begins other collectives than ``model``, or another
    order: ranks that run the graph and ranks that run the model would wait for each other."""
    if not is_one_of_several():
        return
    noted = []
    for function in (model, called_by_names(region, run)):
        with noted_collectives() as begun:
            region.flat_outputs(function, leaves)
        noted.append(begun)
    if noted[0] != noted[1]:
        raise CaptureError("its graph and its forward run different collectives, or another order of them")


def is_faithful(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> bool:
    """Whether ``run``, the graph of ``region`` as traced, and ``model`` agree up to rounding.

    This check keeps all sizes, because a few entries would not show masks, windows and shifts.
    """
    share = 0.01  # of the tolerance for other sizes, where algorithms may differ
    return _agrees(model, region, run, leaves, share) is True


def ignore_use_cache(model: nn.Module, region: Region, run: Callable[[list[Any]], Any], leaves: list[Any]) -> None:
    """Let the setting ``use_cache`` change later where ``run``, traced with it on, agrees with ``model`` without it.

    With it, transformers models return a key-value cache; encoders read it too, and trainers turn it off. A few
    entries in the free sizes are enough: a cache changes the structure of the outputs.
    """
    found = [vars(config) for config in configurations(model) if "use_cache" in vars(config)]
    if "use_cache" not in region.reads or not found or any(settings["use_cache"] is not True for settings in found):
        return
    try:
        for settings in found:
            settings["use_cache"] = False
        if is_faithful(model, region, run, with_few(region, leaves)):
            region.reads -= {"use_cache"}
    finally:
        for settings in found:
            settings["use_cache"] = True


def with_few(region: Region, leaves: list[Any]) -> list[Any]:
    """The flat user inputs of ``region`` cut to a few entries in each free size: a cheap call."""
    return _cut(leaves, [place for dimensions in region.guard.free.values() for place in dimensions], FEW)


def _resized(region: Region, leaves: list[Any]) -> list[Any]:
    """``leaves`` with 2 entries in free sizes of 1, as the tracer expects."""
    places = [place for dimensions in region.guard.free.values() for place in dimensions]
    return _sized(leaves, [(index, dimension) for index, dimension in places if leaves[index].shape[dimension] == 1], 2)


def _sized(leaves: list[Any], dimensions: Dimensions, size: int) -> list[Any]:
    """``leaves`` with ``size`` entries in each of the ``dimensions``: the first ones, which repeat."""
    repeated = list(leaves)
    for index, dimension in dimensions:
        copies = -(-size // max(1, repeated[index].shape[dimension]))
        repeated[index] = torch.cat([repeated[index]] * copies, dimension) if copies > 1 else repeated[index]
    return _cut(repeated, dimensions, size)


def _cut(leaves: list[Any], dimensions: Dimensions, size: int) -> list[Any]:
    """``leaves`` with at most ``size`` entries in each of the ``dimensions``, with the usual strides."""
    cut = list(leaves)
    for index, dimension in dimensions:
        cut[index] = cut[index].narrow(dimension, 0, min(size, cut[index].shape[dimension]))
    for index in {index for index, _ in dimensions}:
        tensor = leaves[index]
        layouts = [torch.contiguous_format, *filter(None, [CHANNELS_LAST.get(tensor.dim())])]
        layout = next((layout for layout in layouts if tensor.is_contiguous(memory_format=layout)), None)
        if layout is not None:
            cut[index] = cut[index].clone(memory_format=layout)
    return cut


def _agrees(
    model: Callable[..., Any], region: Region, run: Callable[[list[Any]], Any], leaves: list[Any], share: float = 1.0
) -> bool | None:
    """Whether both compute the same for ``leaves``; None where ``model`` does not support them."""
    with bounded_lookups(leaves):
        try:
            expected, structure = region.flat_outputs(model, leaves)
        except Exception:
            return None
        try:
            # For a size that the graph does not support, it may compute more than the model does.
            actual, own_structure = region.flat_outputs(called_by_names(region, run), leaves)
            return structure == own_structure and are_close(expected, actual, TOLERANCES, share)
        except Exception:
            return False


def called_by_names(region: Region, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, which takes flat inputs of ``region``, as a function of keyword arguments."""

    def called(**keywords: Any) -> Any:
        return run(region.call.leaves((), keywords), passed=region.call.passed((), keywords))

    return called


def _attribute_of(outputs: Any) -> str | None:
    """The name of an attribute of ``outputs``, or of a value in them, that the same value from a program would lack."""
    if isinstance(outputs, Tensor):
        named = [*vars(outputs)] if type(outputs) in (Tensor, nn.Parameter) else []
        return named[0] if named else "requires_grad" if outputs.requires_grad and outputs.is_leaf else None
    values, spec = pytree.tree_flatten(outputs, is_leaf=lambda value: value is not outputs)
    if len(values) == 1 and values[0] is outputs:
        return None
    anew = vars(pytree.tree_unflatten(values, spec)) if hasattr(outputs, "__dict__") else {}
    own = [name for name in getattr(outputs, "__dict__", {}) if name not in anew]
    return own[0] if own else next(filter(None, map(_attribute_of, values)), None)
