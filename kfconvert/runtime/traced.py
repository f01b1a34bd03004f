"""The forward of a converted model while torch.compile, torch.export or torch.jit.trace follows it.

What they get is the program on live weights: its fused modules call operators of ours, everything else is ATen's. The
guard stays outside of their graphs. What it says of the model is asked once, when they trace; afterwards torch.compile
itself looks whether the model is still as it was. So that it looks at all that the original reads, it follows the
original forward first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from ..region import SymbolicGuard, UntraceableGuard, is_comparable, is_known_to_be
from ..torch_state import transformed
from .dynamo import OriginalPass
from .frozen import FrozenError
from .inductor import introduce_operators
from .original_forwards import originals, originals_wanted
from .program import UnfitTensors
from .tensor_facts import ELEMENTS

if TYPE_CHECKING:
    from .guarded import GuardedForward
    from .variant import Variant

# Index of a variant, where its arguments stand among those of the call, and places and names of those that must have
# their defaults. (Dynamo does not take constants of other kinds for what can be compared.)
Choice = tuple[int, tuple[int, ...], tuple[tuple[int, str], ...]]

_original_pass = OriginalPass()
_WATCHED = "a TorchFunctionMode around it would not see the fused calls"
_SIZES = "its arguments are not of the kinds and sizes that were converted, as far as is known while it is traced"


def traced(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The outputs of a call that is being traced."""
    if torch.compiler.is_dynamo_compiling():
        return _by_dynamo(guarded, args, kwargs)
    if torch._C._get_tracing_state():
        return _by_jit(guarded, args, kwargs)
    return _by_export(guarded, args, kwargs)


def _by_dynamo(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    choices, recorded = _begin(id(guarded), (len(args), *kwargs), _is_watched()), torch.is_grad_enabled()
    outputs = guarded.original(*args, **kwargs)
    if choices is None:
        return outputs
    for choice in choices:
        variant = guarded.variants[choice[0]]
        leaves = _leaves(variant, choice, args, kwargs)
        if leaves is not None and _fits(variant, leaves):
            wanted = tuple([recorded and isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves])
            if _end(id(guarded), choice[0], recorded, wanted):
                return variant.structured(variant.program.traced(leaves))
            return outputs
    _end(id(guarded), None, False, ())
    return outputs


def _bring_back(guarded: GuardedForward) -> None:
    """Programs on live weights read all of them."""
    if guarded.frozen is not None:
        guarded.frozen.bring_back("a compiler reads them")


def _is_watched() -> bool:
    """Whether a TorchFunctionMode is around the call; Dynamo knows of those that it will find there at run time."""
    for index in range(torch._C._len_torch_function_stack()):
        # torch.set_default_device is a mode too, and decides about new tensors only.
        if type(torch._C._get_function_stack_at(index)) is not DeviceContext:
            return True
    return False


@torch.compiler.assume_constant_result
def _begin(address: int, spelling: tuple, watched: bool) -> tuple[Choice, ...] | None:
    """What the original pass begins with; None where the original forward is to stay in the trace."""
    guarded = _at(address)
    _bring_back(guarded)
    if originals_wanted() or _original_pass.is_open(guarded):
        return None
    reason, choices = (_WATCHED, ()) if watched else _choices(guarded, spelling)
    if reason is not None:
        guarded.left_out(reason)
        return None
    _original_pass.begin(guarded)
    return choices


@torch.compiler.assume_constant_result
def _end(address: int, index: int | None, recorded: bool, wanted: tuple[bool, ...]) -> bool:
    """Whether the program of the variant with this index, which fits the call, is to take the place of the original
    forward, which was followed; ``wanted``: which of its flat arguments want gradients."""
    guarded = _at(address)
    reason = _SIZES if index is None else None
    if index is not None and torch.compiler.is_exporting():
        reason = _lost_in_program(guarded, guarded.variants[index], recorded)
    elif index is not None and recorded:
        reason = guarded.lost_gradient(guarded.variants[index].region, wanted)
    reason = _original_pass.end(reason is None) or reason
    if reason is not None:
        guarded.left_out(reason)
        return False
    introduce_operators()
    return True


def _at(address: int) -> GuardedForward:
    """The forward that the caller has: before torch 2.12 Dynamo hands on no objects where it takes the result for a
    constant, but their ``id()``, on which it then guards."""
    return ctypes.cast(address, ctypes.py_object).value


def _by_export(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.export, where it runs the Python code: with tensors without data, whose sizes may be symbols."""
    if guarded.frozen is not None and guarded.frozen.host_bytes:
        raise FrozenError(
            f"weights of {guarded.frozen.name} lie in host memory, where kfconvert.freeze has moved them, and "
            "torch.export has begun with them already: use kfconvert.export"
        )
    if originals_wanted():
        return guarded.original(*args, **kwargs)
    with ExitStack() as stack:
        for variant in guarded.variants:
            stack.enter_context(variant.program.restored())
        return _exported(guarded, args, kwargs)


def _exported(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    modes: list[Any] = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    watched = not all(type(mode).__module__.startswith("torch.") for mode in modes)  # export has modes of its own
    reason, choices = (_WATCHED, ()) if watched else _choices(guarded, (len(args), *kwargs))
    if reason is not None:
        guarded.left_out(reason)
        return guarded.original(*args, **kwargs)
    recorded = torch.is_grad_enabled()
    with originals(), disable_proxy_modes_tracing():  # what it asks of sizes is noted, what it calls is not
        guarded.original(*args, **kwargs)
    for choice in choices:
        variant = guarded.variants[choice[0]]
        leaves = _leaves(variant, choice, args, kwargs)
        if leaves is not None and _fits(variant, leaves, named=True):
            reason = _lost_in_program(guarded, variant, recorded)
            if reason is not None:
                break
            return variant.structured(variant.program.traced(_held_to_layouts(variant, leaves)))
    guarded.left_out(reason or _SIZES)
    return guarded.original(*args, **kwargs)


def _held_to_layouts(variant: Variant, leaves: list[Any]) -> list[Any]:
    """Views of ``leaves`` that a graph, which has no conditions on strides, can only make again of tensors that are
    contiguous where the program depends on it: one dimension is a view of all dimensions of no other."""
    held = list(leaves)
    for index in variant.program.laid_out:
        held[index] = held[index].view(-1).view(held[index].shape)
    return held


def _by_jit(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.jit.trace, which runs the Python code with tensors that have data. People call what it traced with other
    sizes as well; its graph fails there where the program does not admit them."""
    with _untraced():
        _bring_back(guarded)
    if originals_wanted():
        return guarded.original(*args, **kwargs)
    with _untraced():
        reason, choices = (_WATCHED, ()) if _is_watched() else _choices(guarded, (len(args), *kwargs))
        for index, *_ in choices:
            variant = guarded.variants[index]
            leaves: Any = variant.region.call.leaves(args, kwargs)
            reason = variant.refusal(leaves)
            if reason is None:
                break
    held = None
    if reason is None:
        guard: Any = variant.symbolic_guard
        held = None if variant.region.computes_with_sizes else guard.held_to_sizes(leaves)
        reason = "torch.jit.trace would fix the sizes with which it computes" if held is None else None
    if held is not None:
        reason = _lost_in_program(guarded, variant, torch.is_grad_enabled())
    if held is None or reason is not None:
        guarded.left_out(reason or _SIZES)
        return guarded.original(*args, **kwargs)
    return variant.structured(variant.program.traced(_held_to_layouts(variant, held)))


@contextmanager
def _untraced() -> Iterator[None]:
    """Within the block, torch.jit.trace records nothing."""
    library: Any = torch._C  # the stubs lack one of these functions
    state = library._get_tracing_state()
    library._set_tracing_state(None)
    try:
        yield
    finally:
        library._set_tracing_state(state)


def _choices(guarded: GuardedForward, spelling: tuple) -> tuple[str | None, tuple[Choice, ...]]:
    """Why a call with so many positional arguments and these keywords must show its original forward, else None; and
    the variants that may serve it, depending on the arguments."""
    reason = _refusal(guarded)
    if reason is not None:
        return reason, ()
    count, *keywords = spelling
    choices: list[Choice] = []
    for variant in guarded.candidates(spelling):
        reason = _unfit(variant)
        taken, left_out = variant.region.call.order(count, keywords) or ([], [])
        names = [*variant.region.call.positional[:count], *keywords]
        if reason is None and all(is_comparable(default) for _, default in left_out):
            defaulted = tuple((place, names[place]) for place, _ in left_out)
            choices.append((guarded.variants.index(variant), tuple(taken), defaulted))
    return None if choices else reason or guarded.other_form(), tuple(choices)


def _refusal(guarded: GuardedForward) -> str | None:
    """Why no program may stand for the model as it is now, and in the mode in which it is called."""
    if transformed():
        return "torch.func transforms it"
    if torch.onnx.is_in_onnx_export():
        return "ONNX does not know the operators"
    state = guarded.state
    watched = state.attributes if state else None
    reason = guarded.state_refusal()
    if reason is not None or watched is None:
        return reason
    state.attributes = watched  # without tensors of torch.export among them
    if state.hooked_backward is not None:
        return state.hooked_backward
    if state.asks_for_gradients:
        return f"its code asks for {state.asks_for_gradients}"
    if any(isinstance(value, (torch.Tensor, numpy.ndarray)) for _, value, _ in (*state.compared, *state.code.compared)):
        # A compiled original would read them anew in each call.
        return "numbers of its attributes stand in the program"
    if any(isinstance(value, numpy.generic) for _, _, value in (*state.attributes.entries, *state.code.watch.entries)):
        return "numbers of NumPy stand in the program, which Dynamo takes for inputs"
    return None


def _unfit(variant: Variant) -> str | None:
    """Why a compiler must not get the program of ``variant``, whatever the arguments are."""
    region = variant.region
    if region.is_random:
        return "it draws random numbers"
    if region.has_caches:
        return "it takes or returns a key-value cache"
    if region.has_effects:
        return "it writes to its arguments, or asserts what depends on their values"
    if region.asked - {ELEMENTS}:
        return f"its code asks for {', '.join(sorted(region.asked))} of tensors"
    if region.communicates or region.shards:
        return "it reads shards of distributed parameters, or waits for other ranks"
    if region.default_device not in (None, torch.get_default_device()):
        return "another device is the default"
    if any(fact is not True for _, _, fact in variant.strides):
        return "an argument has to lie in memory as in the example, which was not contiguous"
    try:
        variant.program.synchronize()
        variant.symbolic_guard = variant.symbolic_guard or SymbolicGuard(region.guard)
    except (UnfitTensors, UntraceableGuard) as error:
        return str(error)
    return None


def _lost_in_program(guarded: GuardedForward, variant: Variant, recorded: bool) -> str | None:
    """Why torch.export or torch.jit.trace must not get the program of ``variant``, whose parameters and arguments may
    require gradients later on; None where they may. With gradients disabled they get it, and a warning."""
    reason = guarded.lost_gradient(variant.region)
    if reason is not None and not recorded:
        guarded.notices.compilers.give_for_inference(reason)
    return reason if recorded else None


def _leaves(variant: Variant, choice: Choice, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
    """The flat arguments of a call in the order of the region; None where it has another form."""
    _, taken, defaulted = choice
    call, values = variant.region.call, [*args, *kwargs.values()]
    for place, name in defaulted:
        if not is_known_to_be(values[place], call.defaults[name]):
            return None
    values = [values[place] for place in taken]
    if call.flat:
        return values
    leaves, spec = pytree.tree_flatten(values)
    return leaves if spec == call.form.spec else None


def _fits(variant: Variant, leaves: list[Any], named: bool = False) -> bool:
    """Whether the program of ``variant`` may run on these flat arguments, as far as is known of them."""
    guard: Any = variant.symbolic_guard
    if not guard.admits(leaves, named) or not variant.program.is_synchronized():
        return False
    for index in variant.program.laid_out:
        if not leaves[index].is_contiguous():
            return False
    return not variant.memory_formats or variant.program.memory_formats(leaves) == variant.memory_formats
