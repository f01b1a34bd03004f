"""The forward of a converted model: a guard, then the fused program, or the original forward on a miss."""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...inputs import MAX_SPELLINGS, CallForm
from ...torch_state import transformed
from ..recording.cuda_graphs import Ahead, CudaGraphs
from ..recording.program import UnfitTensors
from ..recording.program_errors import ProgramError, leave_to_original
from ..recording.variant import Variant
from ..state.active_modes import onlooker
from ..state.code_state import Codes
from ..state.contents import OfConversion
from ..state.model_state import ModelState
from ..state.random_generators import random_states
from ..state.tensor_facts import ELEMENTS
from ..state.weak_module import WeakModule
from .comparison import differs
from .compilers import refuse_scripting, traced, traced_here
from .freezing import LOOK_EVERY, Frozen, Noted
from .gradient_calls import GradientCall
from .ledger import Ledger, MissNotices
from .original_forwards import originals_wanted
from .recompute import needs_gradient
from .shallow_copy import StateForCopies

# Misses are counted under so many different reasons at most: a reason may name sizes of arguments, of which there is no
# end.
MAX_REASONS = 100
OTHER_REASONS = "other reasons"
# Why a call of a model, or of a part of it, that is in train mode misses. Nothing else is looked at then.
IN_TRAINING = "the model is in train mode"
# Why a call misses for whose form there is no program, as nothing of it is fused.
NOTHING_FUSED = "nothing is fused in calls with these arguments"
# Why a call misses whose program ``Ledger.refresh`` has dropped.
DROPPED = "kfconvert_refresh found outputs that differ from the original's; convert it again"
# A part is switched off once its guard has refused so many calls for their arguments, and more than it has served.
MOST_MISFITS = 32
# The dicts of its own that a module has, which it shares with whoever takes over its attributes.
_STORES = ("_parameters", "_buffers", "_modules")


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
        # Of all call forms that were captured, in their order; ``variants`` are those that serve calls.
        self.regions = [variant.region for variant in variants]
        self._unfused = [variant.region.call for variant in variants if not variant.serves]
        self._dropped: list[CallForm] = []  # by ``drop_differing``
        variants = [variant for variant in variants if variant.serves]
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
        self._originals = 0  # that had run when everything was as it was
        self._noted: tuple[int, list[Noted]] = (0, [])
        # Of a part: whether looking at its calls has cost more than it was good for, see ``MOST_MISFITS``.
        self.is_off: bool = False
        # In kfconvert.export: what torch.export traces in place of the original forward.
        self.exported: Callable[[tuple, dict[str, Any]], Any] | None = None
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
        caller = _called_module(sys._getframe(1))
        if caller is not None and not self._model.refers_to(caller) and self._has_copy(caller):
            return type(caller).forward(caller, *args, **kwargs)
        if self.is_off or transformed() or originals_wanted():
            return self.original(*args, **kwargs)
        model = self._model()
        if model.training and self.frozen is None:
            self._note_training()
            return self.forward_of(model)(*args, **kwargs)
        spelling, reason = (len(args), *kwargs), onlooker()
        ahead = None
        if self._last is not None and reason is None and self.frozen is None:
            ahead = self._launch_ahead(spelling, args, kwargs)
        if self.frozen is not None:
            if self.path:  # programs of parts may read what that of the model does not
                self.frozen.bring_back("a submodule was called on its own")
            reason = self._frozen_refusal(self.frozen) or reason
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
        return self._missed(reason or self._no_program(args, kwargs), args, kwargs)

    def _no_program(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why no variant takes these arguments."""
        if any(call.leaves(args, kwargs) is not None for call in self._unfused):
            return NOTHING_FUSED
        dropped = any(call.leaves(args, kwargs) is not None for call in self._dropped)
        return DROPPED if dropped else self.other_form()

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
            return "the original forward was requested"
        if self.frozen is not None:
            reason = self._frozen_refusal(self.frozen) or onlooker()
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
        # Weights may have been written around a change of the mode without a trace in them.
        if self.state.announced:
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
        self.frozen, self._originals = frozen, frozen.originals

    def _frozen_refusal(self, frozen: Frozen) -> str | None:
        """Why a frozen model must run its original forward, None where a program may serve it. Once an original forward
        has run, which may have written attributes, it is looked until all is as it was.

        Raises:
            FrozenError: a call sees that the model has changed since it was frozen.
        """
        change = "it is in train mode" if self.model.training else frozen.sampled_change()
        if change is not None:
            raise frozen.refused(change)
        if self._originals != frozen.originals:
            change = self.state.change()
            if change is not None:
                return change
            self._originals = frozen.originals
        self._unlooked += 1
        if self._unlooked >= LOOK_EVERY:
            self._look(frozen)
        return self.state.circumstance()

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
                return "a weight or buffer was replaced or written"
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
                return self._missed(f"the code reads {self.state.asks_for_gradients} in grad mode", args, kwargs)
        if not wanted:
            drawn = random_states(variant.program.tensors()) if variant.region.is_random else None
            try:
                flat = variant.flat(leaves, self.graphs, bool(self.path), ahead)
            except UnfitTensors:
                raise
            except Exception as error:
                leave_to_original(error, variant.region, drawn)
                raise
            self.hits += 1
            return variant.region.outputs.put_together(flat, passed)
        if self.frozen is not None and self.frozen.host_bytes:
            return self._missed("the call requires gradients, and weights are in host memory", args, kwargs)
        model = self.model
        call = GradientCall(variant, self.state, model, partial(self._original_of, model), parameters, leaves)
        reason = call.refusal()
        if reason is not None:
            return self._missed(reason, args, kwargs)
        recorded = call.run()
        self.hits += 1
        return variant.region.outputs.put_together(recorded, passed)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the model had before the conversion."""
        return self.forward_of(self.model)(*args, **kwargs)

    def _original_of(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(model)(*args, **kwargs)

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """As ``original``, of the ``model`` whose forward this is; to be called at once."""
        if self.frozen is not None:
            self.frozen.originals += 1
            self.frozen.bring_back("a call runs the original forward")
        return partial(type(model).forward, model) if self.own_forward is None else self.own_forward

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
            raise self.frozen.refused("kfconvert_refresh() would prepare derived weights again")
        for variant in self.variants:
            variant.program.clear()
        if self.state is not None:
            self.state.closely = True
        self.stale = False

    def drop_differing(self) -> None:
        """Drop the variants whose programs compute other outputs than the original forward."""
        if self.state is None or self.model.training or self.state_refusal() is not None:
            return
        for variant in [each for each in self.variants if differs(each, self.model)]:
            self.variants.remove(variant)
            self._dropped.append(variant.region.call)
            self._by_spelling.clear()
            self._last = None

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

    def _note_training(self) -> None:
        """Count a call in train mode, and tell of it if it is the first or somebody wants to know. There may be
        hundreds of parts, each with such a call in every step."""
        self.stale = True  # weights may be written in training without a trace in them
        count = self.misses[IN_TRAINING] = self.misses.get(IN_TRAINING, 0) + 1
        if count == 1 or self.notices.on_miss.is_wanted:
            self.notices.tell(self.path, IN_TRAINING, count == 1, True, stacklevel=5)

    def _missed(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        counted = reason if reason in self.misses or len(self.misses) < MAX_REASONS else OTHER_REASONS
        self.misses[counted] += 1
        self.notices.tell(self.path, reason, self.misses[counted] == 1, reason == NOTHING_FUSED, stacklevel=5)
        return self.original(*args, **kwargs)

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


def _brings_back(frozen: Frozen) -> Callable[[], None]:
    return lambda: frozen.bring_back("a call with a new input layout reads them")


_MODULE_SOURCE = nn.Module._call_impl.__code__.co_filename


def _called_module(frame: Any) -> nn.Module | None:
    """The module whose ``__call__`` runs in ``frame``, None for any other caller of its forward."""
    return frame.f_locals.get("self") if frame.f_code.co_filename == _MODULE_SOURCE else None


def install(
    model: nn.Module,
    variants: dict[str, list[Variant]],
    graphs: CudaGraphs | None = None,
    codes: Codes | None = None,
) -> Ledger:
    """Give the submodules of ``model`` named in ``variants`` ("" is the model itself) their guarded forwards, where one
    of their variants serves calls, and the model ``kfconvert_info()`` and ``kfconvert_refresh()``; all else stays.

    Args:
        graphs: decides which calls are recorded; none are by default.
        codes: the code behind the model, as far as that is known already, as it was when the programs were found to be
            right.
    """
    notices, graphs = MissNotices(model), graphs or CudaGraphs(type(model).__name__)
    ledger, codes = Ledger({}, notices, graphs), codes or Codes()
    # From the inside out: the ModelState of a module expects the guarded forwards of the modules within it.
    for path in sorted(variants, key=lambda path: path.count(".") + bool(path), reverse=True):
        if not any(variant.serves for variant in variants[path]):
            continue
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
        guarded = guarded_forward(module)
        if guarded is not None:
            if guarded.frozen is not None:
                guarded.frozen.bring_back("the model is being converted again")
            del module.__dict__["forward"]
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
