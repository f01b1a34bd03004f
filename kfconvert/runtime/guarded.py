"""The forward of a converted model: a guard, then the fused program, or the original forward on a miss."""

from __future__ import annotations

import copy
import inspect
import operator
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from ..inputs import MAX_SPELLINGS
from ..process import parametrizations_computed
from ..region import Region, SymbolicGuard
from ..torch_state import transformed
from .compilers import refuse_scripting, traced_here
from .contents import OfConversion
from .cuda_graphs import MOST_RECORDINGS, Ahead, CudaGraphs
from .frozen import LOOK_EVERY, Frozen, Noted
from .ledger import Ledger, MissNotices
from .model_state import Codes, ModelState
from .original_forwards import originals, originals_wanted
from .program import Program, UnfitTensors, lies_as
from .random_generators import States, put_states_back, random_states
from .recompute import (
    Differentiable,
    has_reentrant_checkpoint,
    is_connected,
    needs_gradient,
    run_recorded,
    saved_memory,
    unsaved,
)
from .refusals import allow_changes
from .shallow_copy import StateForCopies
from .tensor_facts import ELEMENTS, facts
from .traced import traced
from .weak_module import WeakModule

# Misses are counted under so many different reasons at most: a reason may name sizes of arguments, of which there is no
# end.
MAX_REASONS = 100
OTHER_REASONS = "other reasons"
# A part is switched off once its guard has refused so many calls for their arguments, and more than it has served.
MOST_MISFITS = 32
# The dicts of its own that a module has, which it shares with whoever takes over its attributes.
_STORES = ("_parameters", "_buffers", "_modules")
_CHANGED_IN_BETWEEN = "the model was changed between forward and backward, which computes it again: "


class ProgramError(Exception):
    """A program has raised ``error``. What the original does in that call, which may catch it, is for that to say."""

    def __init__(self, error: Exception):
        text = str(error)
        # An assertion within the graph, about sizes that depend on values.
        unlike = isinstance(error, RuntimeError) and "Runtime assertion failed" in text
        super().__init__(
            "sizes that depend on the values of its arguments are not as in the example"
            if unlike
            else f"its program raised {type(error).__name__}: {text.partition(chr(10))[0][:100]}"
        )


@dataclass
class Variant:
    """One captured call form of the model and the program that serves it."""

    region: Region
    program: Program
    # The memory format of each image among the flat inputs of the example; empty if none was channels-last. If one was,
    # images in another memory format give results in another memory format.
    memory_formats: tuple[bool | str, ...] = ()
    # Where and how those flat inputs lie that have to lie as in the example, see ``Program.strides``.
    strides: list[Any] = field(default_factory=list)
    # The answers to what its code asks of tensors, for the example's tensors and the weights.
    facts: list[Any] = field(default_factory=list)
    # The region's guard as compilers can follow it, once one has asked.
    symbolic_guard: SymbolicGuard | None = None

    def facts_of(self, leaves: list[Any]) -> list[Any]:
        """The answers that the code behind the program would get to what it asks of tensors. Raises UnfitTensors where
        a tensor was removed."""
        asked = self.region.asked
        return facts(asked, (*leaves, *self.program.tensors())) if asked else []

    def refusal(self, leaves: list[Any] | None) -> str | None:
        if leaves is None:
            return "other arguments"
        refusal = self.region.guard.refusal(leaves)
        if refusal is None and self.region.default_device not in (None, default_device()):
            return f"the default device is {default_device()}, and was {self.region.default_device}"
        if refusal is None and self.memory_formats and self.program.memory_formats(leaves) != self.memory_formats:
            return "an image has another memory format than that of the example, which was channels-last"
        if refusal is None and self.strides and not lies_as(leaves, self.strides):
            return "an argument lies otherwise in memory than in the example, which its code can tell"
        if refusal is None and self.region.asked and self.facts_of(leaves) != self.facts:
            return f"its code asks for {', '.join(sorted(self.region.asked))} of tensors, and these are others"
        return refusal

    @property
    def is_recorded(self) -> bool:
        """Whether CUDA graphs may be recorded of it. A cache that it takes has another length in each call, but for one
        that is empty yet; a recording runs the program more than once, in which other ranks, that may record at other
        times, would have to take part.
        """
        return not (self.region.call.takes_filled_cache or self.region.communicates)

    def structured(self, outputs: tuple[Any, ...]) -> Any:
        """The outputs of a region without caches; compilers follow this."""
        return pytree.tree_unflatten(outputs, self.region.outputs.spec)

    def run(self, leaves: list[Any], passed: Sequence[Any] = ()) -> Any:
        """The outputs. The ``passed`` caches, whose tensors are among ``leaves``, are written to."""
        return self.region.outputs.put_together(self.program.run(leaves), passed)

    def flat(self, leaves: list[Any], graphs: CudaGraphs, is_part: bool, ahead: Ahead | None = None) -> tuple[Any, ...]:
        """The flat outputs; by a recording of ``graphs`` where there is one."""
        if not self.is_recorded:
            return self.program.run(leaves)
        return graphs.run(self.program, leaves, self.region.is_random, is_part, ahead)


class GuardedForward:
    """Stands as ``forward`` in the instance dict of a converted model, or of a part that was captured on its own.

    A call whose arguments and model state pass the guard of one of ``variants`` runs its program; any other runs
    the original forward, is counted by reason, and warned about once a model.
    """

    __name__ = "forward"  # as a method has it

    def __init__(
        self,
        model: nn.Module,
        variants: list[Variant],
        path: str,
        notices: MissNotices,
        graphs: CudaGraphs,
        codes: Codes | None = None,
    ):
        self._model = WeakModule(model)
        self.path, self.notices, self.graphs = path, notices, graphs
        # A forward that somebody has put on the instance before, if any, stays the original one.
        self.own_forward = None if guarded_forward(model) else model.__dict__.get("forward")
        self.variants = variants
        self._by_spelling: dict[tuple, list[Variant]] = {}
        # How the last call was spelled that a program served, and by which variant.
        self._last: tuple[tuple, Variant] | None = None
        # While a model is being unpickled it is still empty; there are no variants then, so that its state does not
        # matter.
        reads = {read for variant in variants for read in variant.region.reads}
        slots = {slot for variant in variants for slot in variant.region.slots.values()}
        unread = {slot for variant in variants for slot in variant.region.unread}
        # None without variants; only the methods that also run without variants check for that.
        looks = any(ELEMENTS in variant.region.asked for variant in variants)
        self.state: ModelState = (
            ModelState(model, reads, slots, unread, looks, codes) if variants else None  # type: ignore[assignment]
        )
        self.stale = False
        # What the model was frozen by; the calls since everything was looked at; what the tensors of the programs were
        # then, after how many moves.
        self.frozen: Frozen | None = None
        self._unlooked = 0
        self._noted: tuple[int, list[Noted]] = (0, [])
        # Of a part: whether looking at its calls has cost more than it was good for, see ``MOST_MISFITS``.
        self.is_off: bool = False
        self.reset_counters()
        self.__signature__ = inspect.signature(self.own_forward or type(model).forward.__get__(model))

    @property
    def model(self) -> nn.Module:
        """The model or part whose forward this is. Raises ReferenceError where it is gone."""
        return self._model()

    def is_alive(self) -> bool:
        """Whether its module still exists."""
        return not self._model.refers_to(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and self._model.refers_to(args[0]):
            args = args[1:]  # it was bound to the model once more, as a function of its class would have to be
        if traced_here():
            return traced(self, args, kwargs)
        spelling, reason = (len(args), *kwargs), onlooker()
        ahead = None
        if (
            self._last is not None
            and reason is None
            and self.frozen is None
            and not self.is_off
            and not transformed()
            and not originals_wanted()
        ):
            ahead = self._launch_ahead(spelling, args, kwargs)
        caller = _called_module(sys._getframe(1))
        if caller is not None and not self._model.refers_to(caller) and self._has_copy(caller):
            return type(caller).forward(caller, *args, **kwargs)
        if self.is_off or transformed() or originals_wanted():
            return self.original(*args, **kwargs)
        if self.frozen is not None:
            if self.path:  # programs of parts may read what that of the model does not
                self.frozen.bring_back("a part of it is called by itself")
            self._require_unchanged(self.frozen)
            reason = reason or self.state.circumstance()
        else:
            reason = reason or self.state_refusal()
        if reason is not None:
            return self._missed(reason, args, kwargs)
        if self.stale and self.frozen is None:
            self.refresh()
        for variant in self.candidates(spelling):
            leaves: Any = variant.region.call.leaves(args, kwargs)
            try:
                refusal = variant.refusal(leaves)
                if refusal is None:
                    outputs = self._run(variant, leaves, args, kwargs, ahead)
                    self._last = (spelling, variant) if variant.is_recorded else None
                    return outputs
            except UnfitTensors as error:
                refusal = str(error)
            except ProgramError as error:
                if self.frozen is not None:
                    self._look(self.frozen)  # a change may be the cause
                refusal = str(error)
            # If a variant takes this call form, its refusal says more than that of a variant which takes another.
            reason = refusal if leaves is not None else reason
        self._misfits += 1
        self.is_off = bool(self.path) and self._misfits >= max(MOST_MISFITS, self.hits)
        return self._missed(reason or self.other_form(), args, kwargs)

    def _has_copy(self, module: nn.Module) -> bool:
        """Whether ``module`` has the attributes of this model, as DataParallel makes replicas, or as somebody puts the
        whole ``__dict__`` into another object: it then runs the forward of its own class. If not, somebody has assigned
        this forward to it, and the forward still runs its own model, as does one that was put on the instance."""
        if self.own_forward is not None:
            return False
        mine, others = vars(self.model), vars(module)
        return "_is_replica" in others or any(others.get(name) is mine[name] for name in _STORES)

    def refusal_of(self, variant: Variant, leaves: list[Any]) -> str | None:
        """Why ``variant`` cannot serve a call with these flat arguments by its program as it is now, or is none of this
        model; None where it can."""
        if not any(each is variant for each in self.variants):
            return self.other_form()
        if self.is_off or transformed() or originals_wanted() or traced_here():
            return "it is to run its original forward"
        if self.frozen is not None:
            self._require_unchanged(self.frozen)
            reason = onlooker() or self.state.circumstance()
        else:
            reason = onlooker() or self.state_refusal()
        if reason is None and self.stale and self.frozen is None:
            self.refresh()
        try:
            return reason or variant.refusal(leaves)
        except UnfitTensors as error:
            return str(error)

    def state_refusal(self) -> str | None:
        """Why the model as it is now must run its original forward; None where a program may serve it."""
        if self.state is None:
            return self.other_form()
        reason = self.state.refusal()
        # Weights may have been written, in training or around a change of the mode, without a trace in them.
        if self.state.announced or self.model.training:
            self.stale, self.state.announced = True, False
        return reason

    def freeze(self, frozen: Frozen) -> None:
        """Take the model for what it is now. Raises UnfitTensors."""
        if self.stale or self.state.announced:
            self.refresh()
        self._last = None
        for variant in self.variants:
            variant.program.freeze(_brings_back(frozen))
        self.begin(0)
        self._note(frozen)
        self.frozen = frozen

    def _require_unchanged(self, frozen: Frozen) -> None:
        """Raises FrozenError where a call sees that the model has changed since it was frozen."""
        change = "it is in train mode" if self.model.training else frozen.sampled_change()
        if change is not None:
            raise frozen.refused(change)
        self._unlooked += 1
        if self._unlooked >= LOOK_EVERY:
            self._look(frozen)

    def _look(self, frozen: Frozen) -> None:
        """Raises FrozenError where anything that is watched has changed since the model was frozen."""
        change = self.state.change() or self._written(frozen)
        if change is not None:
            self._unlooked = LOOK_EVERY  # so that the next call looks again
            raise frozen.refused(change)
        self._unlooked = 0

    def _written(self, frozen: Frozen) -> str | None:
        """What shows that a tensor was replaced, moved or written since it was last looked."""
        moves, noted = self._noted
        try:
            if not all(each.holds(moves != frozen.moves) for each in noted):
                return "a weight or buffer of it was replaced or written"
            if moves != frozen.moves:
                self._note(frozen)
        except UnfitTensors as error:
            return str(error)
        return None

    def _note(self, frozen: Frozen) -> None:
        self._noted = frozen.moves, [Noted(variant.program) for variant in self.variants]

    def candidates(self, spelling: tuple) -> list[Variant]:
        """The variants that may serve calls with so many positional arguments and these keywords, those with the most
        arguments first; those with fewer serve calls in which some arguments are None."""
        try:
            return self._by_spelling[spelling]
        except KeyError:
            count, *keywords = spelling
            found = [variant for variant in self.variants if variant.region.call.takes(count, keywords)]
            found.sort(key=lambda variant: -len(variant.region.call.names))
            if len(self._by_spelling) >= MAX_SPELLINGS:
                self._by_spelling.clear()
            self._by_spelling[spelling] = found
            return found

    def _launch_ahead(self, spelling: tuple, args: tuple, kwargs: dict[str, Any]) -> Ahead | None:
        """What a GPU can begin with while it is looked whether this call is one like the last."""
        last, self._last = self._last, None
        if last is None or last[0] != spelling or not self.graphs.enabled or torch.is_grad_enabled():
            return None
        _, variant = last
        leaves: Any = variant.region.call.leaves(args, kwargs)
        if leaves is None or variant.region.guard.refusal(leaves) is not None or not variant.program.may_read():
            return None
        return self.graphs.launch_ahead(variant.program, leaves)

    def _run(
        self, variant: Variant, leaves: list[Any], args: tuple, kwargs: dict[str, Any], ahead: Ahead | None
    ) -> Any:
        passed = variant.region.call.passed(args, kwargs)
        wanted = torch.is_grad_enabled()
        if wanted:
            places = self.state.parameter_places
            parameters: list[torch.Tensor] = [t for store, key in places if (t := store.get(key)) is not None]
            wanted = needs_gradient(parameters, leaves)
            if not wanted and self.state.asks_for_gradients:
                # Such as torch.is_grad_enabled(), which says more than what is wanted.
                return self._missed(f"its code asks for {self.state.asks_for_gradients}, under grad mode", args, kwargs)
        if not wanted:
            drawn = random_states(variant.program.tensors()) if variant.region.is_random else None
            try:
                flat = variant.flat(leaves, self.graphs, bool(self.path), ahead)
            except UnfitTensors:
                raise
            except Exception as error:
                _leave_to_original(error, variant.region, drawn)
                raise
            self.hits += 1
            return variant.region.outputs.put_together(flat, passed)
        if self.frozen is not None and self.frozen.host_bytes:
            return self._missed("gradients are wanted, and weights lie in host memory", args, kwargs)
        reason = self._no_gradients(variant, parameters, leaves)
        if reason is not None:
            return self._missed(reason, args, kwargs)
        differentiable = self._differentiable(variant, parameters, leaves)
        if isinstance(differentiable, str):
            return self._missed(f"{differentiable}, and gradients are wanted", args, kwargs)
        model = self.model  # backward may come when nobody else holds it any more
        unchanged = variant.program.unchanged()

        def original(flat: list[Any]) -> Any:
            if not unchanged.holds_for(variant.program.tensors()):
                raise RuntimeError(_CHANGED_IN_BETWEEN + "a weight, buffer or attribute of it holds something else")
            with originals(), self._as_in_forward(model, parameters):
                return variant.region.flat_outputs(partial(self._original_of, model), flat)[0]

        def fused(flat: list[Any]) -> tuple[Any, ...]:
            try:
                return variant.program.run(flat)
            except UnfitTensors:
                raise
            except Exception as error:  # hooks of saved tensors, which are none of the program, may raise around it
                _leave_to_original(error, variant.region, None)
                raise

        held = variant.program.tensors()
        recorded = run_recorded(fused, original, parameters, leaves, differentiable, held)
        self.hits += 1
        return variant.region.outputs.put_together(recorded, passed)

    def _no_gradients(self, variant: Variant, parameters: list[torch.Tensor], leaves: list[Any]) -> str | None:
        """Why this call has to run the original where gradients are wanted; None where they can be computed later."""
        region, known = variant.region, self.state.parameters
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # the stubs lack it
            return "hooks of saved tensors are disabled around it, and gradients are wanted"
        if region.is_random:
            return "it draws random numbers, and gradients are wanted"
        if region.communicates or region.shards:
            return "it is one of several ranks, and gradients are wanted"
        if region.counts_statistics:
            return "a norm in it counts the statistics of each call, and gradients are wanted"
        if self.state.asks_for_gradients:
            return f"its code asks for {self.state.asks_for_gradients}, and gradients are wanted"
        if region.returns_inputs:
            return "it returns an input or a weight as it is, and gradients are wanted"
        if not all(map(operator.is_, parameters, known)) or len(parameters) != len(known):
            # torch.func.functional_call puts other parameters in place for the time of one call; backward comes after
            # it.
            return "its parameters are not those it was converted with, and gradients are wanted"
        if any(map(_has_hooks, parameters)):
            return "a parameter has hooks, which backward would call twice, or for nothing"
        if self.state.hooked_backward is not None:
            return f"{self.state.hooked_backward}, and gradients are wanted"
        if any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves):
            return "an argument was made under inference_mode, and gradients are wanted"
        ours = {id(parameter) for parameter in parameters}
        if any(tensor.requires_grad and id(tensor) not in ours for tensor in variant.program.tensors()):
            return "a buffer or an attribute wants a gradient"
        return None

    def _differentiable(
        self, variant: Variant, parameters: list[torch.Tensor], leaves: list[Any]
    ) -> Differentiable | str:
        """What autograd does with a call of the original, given which of its parameters and arguments want a gradient;
        or why gradients cannot be computed later. It is looked up in one run of the original."""
        tensors = (*parameters, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        wanted = bytes(tensor.requires_grad for tensor in tensors)
        known = variant.region.differentiable
        if wanted not in known:
            if len(known) >= MAX_SPELLINGS:
                known.clear()
            known[wanted] = self._look_up_differentiable(variant, leaves)
        return known[wanted]

    def _look_up_differentiable(self, variant: Variant, leaves: list[Any]) -> Differentiable | str:
        # Hooks that keep what a forward saves for backward (checkpoints, offloading) must keep nothing of this run.
        with originals(), torch.enable_grad(), saved_memory() as saved:
            outputs, _ = variant.region.flat_outputs(self.original, leaves)
        if is_connected(outputs):
            return "one of its outputs is computed from another"
        if has_reentrant_checkpoint(outputs):
            return "it has a reentrant checkpoint"
        wanted = tuple(isinstance(output, torch.Tensor) and output.requires_grad for output in outputs)
        return Differentiable(wanted, unsaved(leaves, saved))

    @contextmanager
    def _as_in_forward(self, model: nn.Module, parameters: list[torch.Tensor]) -> Iterator[None]:
        """Within the block, in a backward pass, the model runs as it did in the forward pass: in eval mode, without
        autocast or ``parametrize.cached()``.

        Raises:
            RuntimeError: something else has changed, which would make other gradients.
        """
        training = [module for module in model.modules() if module.training]
        devices = {parameter.device.type for parameter in parameters} or {"cpu"}
        with ExitStack() as stack:
            stack.enter_context(parametrizations_computed())
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            try:
                for module in training:
                    module.training = False
                current = [store.get(key) for store, key in self.state.parameter_places]
                reason = self.state.refusal() or self.state.hooked_backward
                if reason is None and not all(map(operator.is_, current, self.state.parameters)):
                    reason = "a parameter was replaced"
                if reason is None and any(map(_has_hooks, parameters)):
                    reason = "a parameter was given hooks"
                if reason is not None:
                    raise RuntimeError(_CHANGED_IN_BETWEEN + reason)
                yield
            finally:
                for module in training:
                    module.training = True

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the model had before the conversion."""
        return self._original_of(self.model, *args, **kwargs)

    def _original_of(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self.frozen is not None:
            self.frozen.bring_back("a call runs the original forward")
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(model).forward(model, *args, **kwargs)

    @property
    def __code__(self):
        """That of the original forward: torch.export reads the names of the arguments from it."""
        return type(self.model).forward.__code__

    @property
    def __globals__(self):
        """Asked for by torch.jit.script, which cannot compile this."""
        refuse_scripting()

    def refresh(self) -> None:
        if self.frozen is not None:
            raise self.frozen.refused("what is derived from weights is to be prepared anew")
        for variant in self.variants:
            variant.program.clear()
        if self.state is not None:
            self.state.closely = True
        self.stale = False

    def begin(self, check_weights: int) -> None:
        """See ``Ledger.begin``."""
        if self.state is not None:
            self.state.begin(check_weights)
        for variant in self.variants:
            variant.program.check_weights(check_weights)
        self.stale = False

    def reset_counters(self) -> None:
        self.hits = self._misfits = 0
        self.misses: Counter[str] = Counter()
        self.is_off = False

    def other_form(self) -> str:
        """Why no variant serves a call, where none takes its arguments."""
        if not self.variants:
            return "it was pickled, which does not keep fused programs; convert it again or use kfconvert.save"
        forms = " or ".join(dict.fromkeys(f"({', '.join(each.region.call.names)})" for each in self.variants))
        return f"the call has other arguments than {forms}"

    def _missed(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        counted = reason if reason in self.misses or len(self.misses) < MAX_REASONS else OTHER_REASONS
        self.misses[counted] += 1
        self.notices.tell(self.path, reason, self.misses[counted] == 1, self.model.training, stacklevel=5)
        return self.original(*args, **kwargs)

    def left_out(self, reason: str) -> None:
        """Tell, once a model, why a compiler gets the original forward; in train mode it is what everybody expects."""
        if not self.model.training:
            self.notices.compilers.give(reason)

    def __getstate__(self) -> dict[str, Any]:
        # Programs are built from traced graphs, which do not pickle; the weights and the class of the model do.
        given: tuple[Any, ...] = (self.model, [], self.path, self.notices, self.graphs)
        return {"given": given, "own_forward": self.own_forward, "frozen": self.frozen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GuardedForward.__init__(self, *state["given"])
        self.own_forward = state["own_forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedForward:
        duplicate = memo[id(self)] = object.__new__(type(self))
        state = {**self.__dict__, "_noted": (0, [])}  # a copy is not frozen
        duplicate.__dict__.update({key: copy.deepcopy(value, memo) for key, value in state.items()})
        return duplicate


def _leave_to_original(error: Exception, region: Region, drawn: States | None) -> None:
    """Raises ProgramError where an operator in the program of ``region`` has raised ``error``, once the call has left
    no trace; ``drawn``: the random generators before it."""
    # A step on a static cache may have written a part of it, a batch norm its statistics.
    if region.takes_static_cache or region.counts_statistics or _is_of_handler(error):
        return
    if drawn is not None:
        put_states_back(drawn)
    raise ProgramError(error) from error


def _is_of_handler(error: Exception) -> bool:
    """Whether a handler of signals has raised it, which comes in the midst of anything: such an error is meant for
    whoever has made the call. Operators of a user's own may raise anything else."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)  # of a method
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def _brings_back(frozen: Frozen) -> Callable[[], None]:
    return lambda: frozen.bring_back("weights are to be prepared for inputs of another kind")


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


_CPU = torch.device("cpu")
_MODULE_SOURCE = nn.Module._call_impl.__code__.co_filename


def _called_module(frame: Any) -> nn.Module | None:
    """The module whose ``__call__`` runs in ``frame``, None for any other caller of its forward."""
    return frame.f_locals.get("self") if frame.f_code.co_filename == _MODULE_SOURCE else None


def default_device() -> torch.device:
    """``torch.get_default_device()``, faster where nobody has set one."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


def function_mode() -> str | None:
    """The class of a TorchFunctionMode of this thread, which may do anything in the place of functions; None without
    one."""
    for index in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(index)
        # torch.set_default_device is a mode too, and decides about new tensors only.
        if type(mode) is not DeviceContext:
            return type(mode).__name__
    return None


def onlooker() -> str | None:
    """Why a program must not run under a mode of this thread, which would not see the original's operators; None
    without one."""
    mode = function_mode() if torch._C._len_torch_function_stack() else None
    if mode is not None:
        return f"the {mode} around it would not see the fused calls"
    if torch._C._len_torch_dispatch_stack():
        return "the TorchDispatchMode around it would not see the fused calls"
    return None


def install(
    model: nn.Module,
    variants: dict[str, list[Variant]],
    stats: dict[str, Any],
    recordings: int = MOST_RECORDINGS,
    static_outputs: bool = False,
) -> Ledger:
    """Give the submodules of ``model`` named in ``variants`` their guarded forwards ("" is the model itself), and the
    model ``kfconvert_info()`` and ``kfconvert_refresh()``; all else stays."""
    notices, graphs = MissNotices(model), CudaGraphs(type(model).__name__, recordings, static_outputs)
    ledger, codes = Ledger(stats, notices, graphs), Codes()
    # From the inside out: the ModelState of a module expects the guarded forwards of the modules within it.
    for path in sorted(variants, key=lambda path: path.count(".") + bool(path), reverse=True):
        module = model.get_submodule(path)
        guarded = ledger.guarded[path] = GuardedForward(module, variants[path], path, notices, graphs, codes)
        module.__dict__["forward"] = guarded
        module.__dict__["__getstate__"] = StateForCopies(module, guarded.own_forward)
    model.__dict__["kfconvert_info"] = ledger.info
    model.__dict__["kfconvert_refresh"] = ledger.refresh
    return ledger


def uninstall(model: nn.Module) -> None:
    """Give ``model`` and its submodules their own forwards back; a model that was not converted stays as it is."""
    for module in model.modules():
        allow_changes(module)
        guarded = guarded_forward(module)
        if guarded is not None:
            if guarded.frozen is not None:
                guarded.frozen.bring_back("it is converted anew")
            del module.__dict__["forward"]
            module.__dict__.pop("__getstate__", None)
            if guarded.own_forward is not None:
                module.__dict__["forward"] = guarded.own_forward
        for name in ("kfconvert_info", "kfconvert_refresh"):
            module.__dict__.pop(name, None)
        for name in [name for name, value in vars(module).items() if isinstance(value, OfConversion)]:
            del module.__dict__[name]


def guarded_forward(model: nn.Module) -> GuardedForward | None:
    """The guarded forward of a converted model, None for any other module."""
    found = model.__dict__.get("forward")
    return found if isinstance(found, GuardedForward) else None
