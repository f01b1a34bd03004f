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

# The maximum number of distinct reasons for misses: a reason may contain argument sizes, which are unbounded.
MAX_REASONS = 100
OTHER_REASONS = "other reasons"
# The reason for a miss of a model or part in train mode. No other check runs then.
IN_TRAINING = "the model is in train mode"
# The reason for a miss of a call form without a program, because it has no fusions.
NOTHING_FUSED = "nothing is fused in calls with these arguments"
# The reason for a miss after ``Ledger.refresh`` has dropped the program.
DROPPED = "kfconvert_refresh found outputs that differ from the original's; convert it again"
# A part is switched off once its guard has refused so many calls for their arguments, and more calls than it served.
MOST_MISFITS = 32
# The dicts of a module that are shared when its attributes are copied to another object.
_STORES = ("_parameters", "_buffers", "_modules")


class GuardedForward:
    """The ``forward`` in the instance dict of a converted model, or of a part that was captured separately.

    A call that passes the guard of one of ``variants`` runs its program. Any other call runs the original forward, is
    counted by reason, and causes one warning per model.
    """

    __name__ = "forward"  # like a method

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
        # A forward that was set on the instance earlier stays the original one.
        self.own_forward = None if guarded_forward(model) else model.__dict__.get("forward")
        # All captured call forms in order; ``variants`` has only forms that serve calls.
        self.regions = [variant.region for variant in variants]
        self._unfused = [variant.region.call for variant in variants if not variant.serves]
        self._dropped: list[CallForm] = []  # see ``drop_differing``
        variants = [variant for variant in variants if variant.serves]
        self.variants = variants
        self._by_spelling: dict[tuple, list[Variant]] = {}
        # The spelling of the last call that a program served, and its variant.
        self._last: tuple[tuple, Variant] | None = None
        # During unpickling the model is still empty and has no variants, so that its state does not matter.
        reads = {read for variant in variants for read in variant.region.reads}
        slots = {slot for variant in variants for slot in variant.region.slots.values()}
        unread = {slot for variant in variants for slot in variant.region.unread}
        # None without variants; only methods that also run without variants check for None.
        looks = any(ELEMENTS in variant.region.asked for variant in variants)
        self.state: ModelState = (
            ModelState(model, reads, slots, unread, looks, codes) if variants else None  # type: ignore[assignment]
        )
        self.stale = False
        # The freeze of the model; the calls since the last full check; the tensors of the programs at that check, and
        # the number of moves by then.
        self.frozen: Frozen | None = None
        self._unlooked = 0
        self._originals = 0  # the count at the last full check
        self._noted: tuple[int, list[Noted]] = (0, [])
        # Of a part: whether its checks have cost more than they saved, see ``MOST_MISFITS``.
        self.is_off: bool = False
        # In kfconvert.export: replaces the original forward for torch.export.
        self.exported: Callable[[tuple, dict[str, Any]], Any] | None = None
        self.reset_counters()
        self.__signature__ = inspect.signature(self.own_forward or type(model).forward.__get__(model))

    @property
    def model(self) -> nn.Module:
        """The model or part with this forward. Raises ReferenceError where it no longer exists."""
        return self._model()

    def is_alive(self) -> bool:
        """Whether its module still exists."""
        return not self._model.refers_to(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and self._model.refers_to(args[0]):
            args = args[1:]  # it was bound to the model again, like a function of a class
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
            if self.path:  # programs of parts may read tensors that the model's does not
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
            # The refusal of a variant with this call form is more specific.
            reason = refusal if leaves is not None else reason
        self._misfits += 1
        self.is_off = bool(self.path) and self._misfits >= max(MOST_MISFITS, self.hits)
        return self._missed(reason or self._no_program(args, kwargs), args, kwargs)

    def _no_program(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """The reason why no variant takes these arguments."""
        if any(call.leaves(args, kwargs) is not None for call in self._unfused):
            return NOTHING_FUSED
        dropped = any(call.leaves(args, kwargs) is not None for call in self._dropped)
        return DROPPED if dropped else self.other_form()

    def _has_copy(self, module: nn.Module) -> bool:
        """Whether ``module`` has the attributes of this model, like replicas of DataParallel or an object that received
        the whole ``__dict__``: it then runs its class's forward. Otherwise this forward was assigned to it,
        and still runs its own model, like a forward that was set on the instance."""
        if self.own_forward is not None:
            return False
        mine, others = vars(self.model), vars(module)
        return "_is_replica" in others or any(others.get(name) is mine[name] for name in _STORES)

    def refusal_of(self, variant: Variant, leaves: list[Any]) -> str | None:
        """The reason why ``variant`` cannot serve a call with these flat arguments now, or does not belong to this
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
        """The reason why the model must run its original forward now; None where a program may serve."""
        if self.state is None:
            return self.other_form()
        reason = self.state.refusal()
        # Weights may have been written without a trace before or after the change of the mode.
        if self.state.announced:
            self.stale, self.state.announced = True, False
        return reason

    def freeze(self, frozen: Frozen) -> None:
        """Freeze the current state of the model. Raises UnfitTensors."""
        if self.stale or self.state.announced:
            self.refresh()
        self._last = None
        for variant in self.variants:
            variant.program.freeze(_brings_back(frozen))
        self.begin(0)
        self._note(frozen)
        self.frozen, self._originals = frozen, frozen.originals

    def _frozen_refusal(self, frozen: Frozen) -> str | None:
        """The reason why a frozen model must run its original forward, None where a program may serve it. An original
        forward may have written attributes: after it, every call runs all checks until the state is restored.

        Raises:
            FrozenError: the call detects that the model has changed since it was frozen.
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
        """Raises FrozenError where any watched value has changed since the model was frozen."""
        change = self.state.change() or self._written(frozen)
        if change is not None:
            self._unlooked = LOOK_EVERY  # so that the next call checks again
            raise frozen.refused(change)
        self._unlooked = 0

    def _written(self, frozen: Frozen) -> str | None:
        """Describe a tensor that was replaced, moved or written since the last check."""
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
        """Return the variants for calls with so many positional arguments and these keywords, longest first; shorter
        ones serve calls in which some arguments are None."""
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
        """Launch on the GPU while the host checks whether this call is like the last one."""
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
                # For example torch.is_grad_enabled(), which may be true without such tensors.
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
        """Run the forward that the model had before the conversion."""
        return self.forward_of(self.model)(*args, **kwargs)

    def _original_of(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(model)(*args, **kwargs)

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """As ``original``, for ``model``, which has this forward; call the result at once."""
        if self.frozen is not None:
            self.frozen.originals += 1
            self.frozen.bring_back("a call runs the original forward")
        return partial(type(model).forward, model) if self.own_forward is None else self.own_forward

    @property
    def __code__(self):
        """The code of the original forward: torch.export reads the argument names from it."""
        return type(self.model).forward.__code__

    @property
    def __globals__(self):
        """Raise for torch.jit.script, which cannot compile this."""
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
        """Drop the variants whose programs compute different outputs than the original forward."""
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
        """The reason why no variant serves a call, where none takes its arguments."""
        if not self.variants:
            return "it was pickled, which does not keep fused programs; convert it again or use kfconvert.save"
        forms = " or ".join(dict.fromkeys(f"({', '.join(each.region.call.names)})" for each in self.variants))
        return f"the call has other arguments than {forms}"

    def _note_training(self) -> None:
        """Count a call in train mode, and report it if it is the first or has a listener. Hundreds of parts may each
        have such a call in every step."""
        self.stale = True  # training may write weights without a trace
        count = self.misses[IN_TRAINING] = self.misses.get(IN_TRAINING, 0) + 1
        if count == 1 or self.notices.on_miss.is_wanted:
            self.notices.tell(self.path, IN_TRAINING, count == 1, True, stacklevel=5)

    def _missed(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        counted = reason if reason in self.misses or len(self.misses) < MAX_REASONS else OTHER_REASONS
        self.misses[counted] += 1
        self.notices.tell(self.path, reason, self.misses[counted] == 1, reason == NOTHING_FUSED, stacklevel=5)
        return self.original(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Programs depend on traced graphs, which cannot be pickled, unlike the weights and the class of the model.
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
    return lambda: frozen.bring_back("inputs with a new layout read them")


_MODULE_SOURCE = nn.Module._call_impl.__code__.co_filename


def _called_module(frame: Any) -> nn.Module | None:
    """The module whose ``__call__`` runs in ``frame``, None for other callers of its forward."""
    return frame.f_locals.get("self") if frame.f_code.co_filename == _MODULE_SOURCE else None


def install(
    model: nn.Module,
    variants: dict[str, list[Variant]],
    graphs: CudaGraphs | None = None,
    codes: Codes | None = None,
) -> Ledger:
    """Install the guarded forwards of the submodules named in ``variants`` ("" is the model itself) that have a variant
    in use, and ``kfconvert_info()`` and ``kfconvert_refresh()`` on the model. Nothing else changes.

    Args:
        graphs: decides which calls are recorded; none are by default.
        codes: the code behind the model as far as it is known, in the state in which the programs were validated.
    """
    notices, graphs = MissNotices(model), graphs or CudaGraphs(type(model).__name__)
    ledger, codes = Ledger({}, notices, graphs), codes or Codes()
    # Inner modules first: the ModelState of a module expects the guarded forwards of the modules within it.
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
    """Restore the original forwards of ``model`` and its submodules; a model that was not converted does not change."""
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
