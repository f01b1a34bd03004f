"""The forward of a converted model: a guard, then the fused program, or the original forward on a miss."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...inputs import MAX_SPELLINGS, CallForm
from ...torch_state import transformed
from ..recording.cuda_graphs import Ahead, CudaGraphs
from ..recording.program_errors import Fallback
from ..recording.variant import Variant
from ..state.active_modes import onlooker
from ..state.code_state import Codes
from ..state.fingerprint import may_fetch
from ..state.model_state import ModelState
from ..state.references import OfConversion
from ..state.weak_module import WeakModule
from .comparison import difference
from .compilers import traced, traced_here
from .freezing import Frozen, Sample
from .gradient_calls import GradientCall
from .ledger import Ledger
from .notices import Notices
from .original_forwards import originals_wanted
from .recompute import needs_gradient
from .shallow_copy import Replicate, StateForCopies

# The maximum number of distinct reasons for misses: a reason may contain argument sizes, which are unbounded.
MAX_REASONS = 100
OTHER_REASONS = "other reasons"
# The reason for a miss of a model or part in train mode. No other check runs then.
IN_TRAINING = "the model is in train mode"
# The reason for a miss of a call form without a program, because it has no fusions.
NOTHING_FUSED = "nothing is fused in calls with these arguments"
_PICKLED = "it was pickled, which does not keep fused programs; convert it again, or use kfconvert.save instead"
# Misses for these reasons cause no warning.
_EXPECTED = (IN_TRAINING, NOTHING_FUSED)
# A part is switched off once its guard has refused so many calls for their arguments, and more calls than it served.
MOST_MISFITS = 32


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
        notices: Notices,
        graphs: CudaGraphs,
        codes: Codes | None = None,
    ):
        self._model = WeakModule(model)
        self.path, self.notices, self.graphs = path, notices, graphs
        # A forward that was set on the instance earlier stays the original one.
        self.own_forward = None if guarded_forward(model) else model.__dict__.get("forward")
        # All captured call forms in order; ``variants`` has only forms that serve calls.
        self.regions = [variant.region for variant in variants]
        # The other call forms, each with the reason for a miss.
        self._unserved: list[tuple[CallForm, str]] = [
            (variant.region.call, NOTHING_FUSED) for variant in variants if not variant.serves
        ]
        self.variants = variants = [variant for variant in variants if variant.serves]
        # Whether no call of the forward has a program, only the recorded steps of ``generate``.
        self._only_steps = bool(variants) and all(variant.region.takes_static_cache for variant in variants)
        self._by_spelling: dict[tuple, list[Variant]] = {}
        # The spelling of the last call that a program served, and its variant.
        self._last: tuple[tuple, Variant] | None = None
        # During unpickling the model is still empty and has no variants, so that its state does not matter.
        reads = {read for variant in variants for read in variant.region.reads}
        slots = {slot for variant in variants for slot in variant.region.slots.values()}
        # None without variants; only methods that also run without variants check for None.
        autocast = next((variant.region.autocast for variant in variants), None)
        self.state: ModelState = (
            ModelState(model, reads, slots, codes, autocast) if variants else None  # type: ignore[assignment]
        )
        # Whether weights may have been written without a trace since plans were made.
        self.stale = False
        self._check_weights = self._unchecked = 0
        self.frozen: Frozen | None = None
        # Of a part: whether its checks have cost more than they saved, see ``MOST_MISFITS``.
        self.is_off: bool = False
        # In kfconvert.export: replaces the original forward for torch.export.
        self.exported: Callable[[tuple, dict[str, Any]], Any] | None = None
        # With training=True: runs calls in train mode, see ``training.CompiledForward``.
        self.training: Callable[..., tuple[bool, Any, str | None]] | None = None
        self.was_pickled = False  # with programs, which pickles do not keep
        self.reset_counters()
        self.__signature__ = inspect.signature(self.own_forward or type(model).forward.__get__(model))

    @property
    def model(self) -> nn.Module:
        """The model or part with this forward. Raises ReferenceError where it no longer exists."""
        return self._model()

    @property
    def is_converted(self) -> bool:
        """Whether it has programs, or had some before it was pickled; others only run calls in train mode."""
        return self.state is not None or self.was_pickled

    def is_alive(self) -> bool:
        """Whether its module still exists."""
        return not self._model.refers_to(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the caller and the mode, the state of the model, and the arguments of each variant; then run a program,
        or the original forward with a reason."""
        if args and self._model.refers_to(args[0]):
            args = args[1:]  # it was bound to the model again, like a function of a class
        if traced_here():
            return traced(self, args, kwargs)
        if self._is_bypassed():
            return self.original(*args, **kwargs)
        spelling = (len(args), *kwargs)
        reason = self._mode_refusal()
        if reason is IN_TRAINING and self.training is not None and torch.is_grad_enabled() and onlooker() is None:
            has_run, outputs, reason = self.training(self.model, self.own_forward, args, kwargs)
            if has_run:
                if reason is None:
                    self.hits += 1
                else:
                    self._count_miss(reason, stacklevel=5)
                return outputs
        # The device computes while the host checks the rest.
        ahead = None if reason else self._launch_ahead(spelling, args, kwargs)
        reason = reason or self.state_refusal()
        if reason is not None:
            return self._missed(reason, args, kwargs)
        for variant in self.candidates(spelling):
            leaves = variant.region.call.leaves(args, kwargs)
            if leaves is None:
                continue
            try:
                reason = variant.refusal(leaves)
                if reason is None:
                    flat = self._flat_outputs(variant, leaves, ahead)
                    self.hits += 1
                    self._last = spelling, variant
                    return variant.region.outputs.put_together(flat, variant.region.call.passed(args, kwargs))
            except Fallback as error:
                reason = str(error)
                break
        else:
            self._misfits += 1
            self.is_off = bool(self.path) and self._misfits >= max(MOST_MISFITS, self.hits)
        return self._missed(reason or self._no_program(args, kwargs), args, kwargs)

    def _is_bypassed(self) -> bool:
        """Whether calls run the original forward uncounted."""
        return self.is_off or self._only_steps or transformed() or originals_wanted()

    def _mode_refusal(self) -> str | None:
        """The reason why the mode of the model, or a mode of the thread, needs the original forward; None without."""
        if self.frozen is None and self.model.training:
            self.stale = True  # training may write weights without a trace
            return IN_TRAINING
        return onlooker()

    def state_refusal(self) -> str | None:
        """The reason why the model must run its original forward now; None where a program may serve."""
        if self.state is None:
            return self.other_form()
        if self.frozen is not None:
            return self.frozen.refusal(self.model.training)
        if self._check_weights:
            self._compare_weights()
        reason = self.state.refusal()
        # Weights may have been written without a trace before or after the change of the mode.
        if self.state.announced:
            self.stale, self.state.announced = True, False
        if reason is None and self.stale:
            self.refresh()
        return reason

    def _compare_weights(self) -> None:
        """In every ``check_weights``-th call, compare the contents of tensors with their last record."""
        self._unchecked += 1
        if self._unchecked >= self._check_weights and may_fetch():
            self._unchecked, self.state.closely = 0, True
            for variant in self.variants:
                variant.program.drop_overwritten()

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
        """Launch a recording on the GPU if this call is like the last one. A call that a later check refuses discards
        the outputs, see ``CudaGraphs.launch_ahead``."""
        last, self._last = self._last, None
        if last is None or last[0] != spelling or not self.graphs.enabled or torch.is_grad_enabled():
            return None
        _, variant = last
        if self.frozen is not None or not variant.is_recorded:
            return None
        leaves: Any = variant.region.call.leaves(args, kwargs)
        if leaves is None or variant.region.guard.refusal(leaves) is not None or not variant.program.may_read():
            return None
        return self.graphs.launch_ahead(variant.program, leaves)

    def _flat_outputs(self, variant: Variant, leaves: list[Any], ahead: Ahead | None) -> tuple[Any, ...]:
        """Return the flat outputs of the program of ``variant``. Raises Fallback where it cannot serve the call."""
        try:
            if not torch.is_grad_enabled():
                return variant.flat(leaves, self.graphs, bool(self.path), ahead)
            places = self.state.parameter_places
            parameters: list[torch.Tensor] = [t for store, key in places if (t := store.get(key)) is not None]
            if needs_gradient(parameters, leaves):
                return GradientCall(variant, self.state, self.model, self.forward_of, parameters, leaves).run()
            if self.state.asks_for_gradients:
                # For example torch.is_grad_enabled(), which may be true without such tensors.
                raise Fallback(f"the code reads {self.state.asks_for_gradients} in grad mode")
            return variant.flat(leaves, self.graphs, bool(self.path), ahead)
        except Fallback:
            if self.frozen is not None:
                self.frozen.check()  # a change may be the cause
            raise

    def _missed(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Count and report a miss, and return the outputs of the original forward."""
        self._count_miss(reason, stacklevel=6)
        return self.original(*args, **kwargs)

    def _count_miss(self, reason: str, stacklevel: int) -> None:
        counted = reason if reason in self.misses or len(self.misses) < MAX_REASONS else OTHER_REASONS
        self.misses[counted] += 1
        self.notices.missed(self.path, reason, self.misses[counted] == 1, reason in _EXPECTED, stacklevel)

    def _no_program(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """The reason why no variant takes these arguments."""
        reasons = (reason for call, reason in self._unserved if call.leaves(args, kwargs) is not None)
        return next(reasons, None) or self.other_form()

    def other_form(self) -> str:
        """The reason why no variant serves a call, where none takes its arguments."""
        if not self.variants:
            return _PICKLED if self.was_pickled else NOTHING_FUSED
        forms = " or ".join(dict.fromkeys(f"({', '.join(each.region.call.names)})" for each in self.variants))
        return f"the call has other arguments than {forms}"

    def refusal_of(self, variant: Variant, leaves: list[Any]) -> str | None:
        """The reason why ``variant`` cannot serve a call with these flat arguments now, or does not belong to this
        model; None where it can."""
        if not any(each is variant for each in self.variants):
            return self.other_form()
        if self.is_off or transformed() or originals_wanted() or traced_here():
            return "the original forward was requested"
        try:
            return self._mode_refusal() or self.state_refusal() or variant.refusal(leaves)
        except Fallback as error:
            return str(error)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that the model had before the conversion."""
        return self.forward_of(self.model)(*args, **kwargs)

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """As ``original``, for ``model``, which has this forward."""
        if self.frozen is not None:
            self.frozen.sample.originals += 1
        return partial(type(model).forward, model) if self.own_forward is None else self.own_forward

    def freeze(self, sample: Sample) -> None:
        """Freeze the current state of the model. Raises UnfitTensors."""
        if self.stale or self.state.announced:
            self.refresh()
        programs = [variant.program for variant in self.variants]
        for program in programs:
            program.freeze()
        self.begin(0)
        self.frozen = Frozen(sample, self.state, programs)

    def refresh(self) -> None:
        """Prepare all derived weights again. Raises FrozenError."""
        if self.frozen is not None:
            raise self.frozen.sample.refused("kfconvert_refresh() would prepare derived weights again")
        for variant in self.variants:
            variant.program.clear()
        if self.state is not None:
            self.state.closely = True
        self.stale = False

    def drop_differing(self) -> None:
        """Drop the variants whose programs compute other outputs than the original forward, or raise an error."""
        if self.state is None or self.model.training or self.state_refusal() is not None:
            return
        for variant in list(self.variants):
            found = difference(variant, self.model)
            if found is not None:
                self.variants.remove(variant)
                self._unserved.append((variant.region.call, f"kfconvert_refresh found {found}; convert it again"))
                self._by_spelling.clear()
                self._last = None

    def begin(self, check_weights: int) -> None:
        """See ``Ledger.begin``."""
        if self.state is not None:
            self.state.begin()
        for variant in self.variants:
            variant.program.record_contents(check_weights > 0)
        self._check_weights, self._unchecked, self.stale = check_weights, 0, False

    def reset_counters(self) -> None:
        self.hits = self._misfits = 0
        self.misses: Counter[str] = Counter()
        self.is_off = False

    @property
    def __code__(self):
        """The code of the original forward: torch.export reads the argument names from it."""
        return type(self.model).forward.__code__

    def __getstate__(self) -> dict[str, Any]:
        # Programs depend on traced graphs, which cannot be pickled, unlike the weights and the class of the model.
        given: tuple[Any, ...] = (self.model, [], self.path, self.notices, self.graphs)
        kept = {"own_forward": self.own_forward, "training": self.training, "was_pickled": self.is_converted}
        return {"given": given, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GuardedForward.__init__(self, *state.pop("given"))
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedForward:
        duplicate = memo[id(self)] = object.__new__(type(self))
        state = {**self.__dict__, "frozen": None}  # a copy may change
        duplicate.__dict__.update({key: copy.deepcopy(value, memo) for key, value in state.items()})
        return duplicate


def install(model: nn.Module, variants: dict[str, list[Variant]], graphs: CudaGraphs | None = None) -> Ledger:
    """Install the guarded forwards of the submodules named in ``variants`` ("" is the model itself) that have a variant
    in use, and ``kfconvert_info()`` and ``kfconvert_refresh()`` on the model. Nothing else changes.

    Args:
        graphs: decides which calls are recorded; none are by default.
    """
    notices, graphs = Notices(type(model).__name__), graphs or CudaGraphs(type(model).__name__)
    ledger, codes = Ledger({}, notices, graphs), Codes()
    # Inner modules first: the ModelState of a module expects the guarded forwards of the modules within it.
    for path in sorted(variants, key=lambda path: path.count(".") + bool(path), reverse=True):
        if any(variant.serves for variant in variants[path]):
            _install(model, path, variants[path], ledger, codes)
    model.__dict__["kfconvert_info"] = ledger.info
    model.__dict__["kfconvert_refresh"] = ledger.refresh
    return ledger


def install_training(model: nn.Module, ledger: Ledger, training: Callable[..., tuple[bool, Any, str | None]]) -> None:
    """Let ``training`` run the calls of ``model`` in train mode, whether or not programs serve others."""
    guarded = ledger.guarded.get("") or _install(model, "", [], ledger, Codes())
    guarded.training = training


def _install(model: nn.Module, path: str, variants: list[Variant], ledger: Ledger, codes: Codes) -> GuardedForward:
    module = model.get_submodule(path)
    guarded = GuardedForward(module, variants, path, ledger.notices, ledger.graphs, codes)
    ledger.guarded[path] = module.__dict__["forward"] = guarded
    module.__dict__["__getstate__"] = StateForCopies(module, guarded.own_forward)
    module.__dict__["_replicate_for_data_parallel"] = Replicate(module, guarded.own_forward)
    return guarded


def uninstall(model: nn.Module) -> None:
    """Restore the original forwards of ``model`` and its submodules; a model that was not converted does not change."""
    for module in model.modules():
        guarded = guarded_forward(module)
        if guarded is not None:
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
