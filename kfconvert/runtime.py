"""The forward of a converted model: a guard, then the fused program, or the original forward on a miss."""

from __future__ import annotations

import copy
import inspect
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .calls import MAX_SPELLINGS
from .model_state import ModelState
from .ops.registration import transformed
from .program import Program
from .recompute import needs_gradient, run_recorded
from .tracer import Region


@dataclass
class Variant:
    """One captured call form of the model and the program that serves it."""

    region: Region
    program: Program

    def refusal(self, leaves: list[Any] | None) -> str | None:
        return "other arguments" if leaves is None else self.region.guard.refusal(leaves)

    def structured(self, outputs: tuple[Any, ...]) -> Any:
        return pytree.tree_unflatten(outputs, self.region.out_spec)

    def run(self, leaves: list[Any]) -> Any:
        return self.structured(self.program.run(leaves))


class Ledger:
    """What the guarded forwards of one converted model share: its statistics, and that misses are warned about once.

    ``guarded``: the guarded forward of each captured module by its path; "" is the model itself.
    """

    def __init__(self, model: nn.Module, stats: dict[str, Any]):
        self.model, self.stats = model, stats
        self.guarded: dict[str, GuardedForward] = {}
        self.warned = False

    def info(self) -> dict[str, Any]:
        """The conversion statistics and, under "guard", hits and misses by reason; under "parts" those of each
        submodule that was captured on its own."""
        counts = {path: {"hits": g.hits, "misses": dict(g.misses)} for path, g in self.guarded.items()}
        return {**self.stats, "guard": counts.pop("", {"hits": 0, "misses": {}}), "parts": counts}

    def refresh(self) -> None:
        """Prepare everything derived from weights anew at the next call.

        Needed only after writes that leave no trace in a tensor, such as ``parameter.data.mul_(...)``; it happens by
        itself after every call in train mode.
        """
        for guarded in self.guarded.values():
            guarded.refresh()

    def reset_counters(self) -> None:
        self.warned = False
        for guarded in self.guarded.values():
            guarded.reset_counters()

    def warn(self, missed: GuardedForward, reason: str, stacklevel: int) -> None:
        if not self.warned:
            self.warned = True
            path = next((path for path, guarded in self.guarded.items() if guarded is missed), "")
            name = type(self.model).__name__ + (f".{path}" if path else "")
            warnings.warn(
                f"kfconvert: {name} runs its original forward for this call: {reason}. "
                "Further misses are counted in model.kfconvert_info().",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


class _Originals(threading.local):
    wanted = 0


_originals = _Originals()


@contextmanager
def originals() -> Iterator[None]:
    """Within the block, converted models and their parts run their original forwards in this thread, uncounted."""
    _originals.wanted += 1
    try:
        yield
    finally:
        _originals.wanted -= 1


class GuardedForward:
    """Stands as ``forward`` in the instance dict of a converted model, or of a part that was captured on its own.

    A call whose arguments and model state pass the guard of one of ``variants`` runs its program; any other runs
    the original forward, is counted by reason, and warned about once a model.
    """

    def __init__(self, model: nn.Module, variants: list[Variant], ledger: Ledger):
        self.model = model
        # A forward that somebody has put on the instance before, if any, stays the original one.
        self.own_forward = None if guarded_forward(model) else model.__dict__.get("forward")
        self.variants = variants
        self._by_spelling: dict[tuple, list[Variant]] = {}
        self.ledger = ledger
        # While it is being unpickled, the model is still empty; without variants its state does not matter.
        settings = {name for variant in variants for name in variant.region.settings}
        self.state = ModelState(model, settings) if variants else None
        self.stale = False
        self.reset_counters()
        self.__signature__ = inspect.signature(self.own_forward or type(model).forward.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or transformed():
            return self.original(*args, **kwargs)
        if _originals.wanted:
            return self._original_unwatched(args, kwargs)
        reason = self.state.refusal() if self.variants else self._other_form()
        if self.model.training:
            self.stale = True
        if reason is not None:
            return self._missed(reason, args, kwargs)
        if self.stale:
            self.refresh()
        for variant in self._candidates((len(args), *kwargs)):
            leaves = variant.region.call.leaves(args, kwargs)
            refusal = variant.refusal(leaves)
            if refusal is None:
                return self._run(variant, leaves, args, kwargs)
            # The refusal of a variant that takes these arguments says more than that another takes others.
            reason = refusal if leaves is not None else reason
        return self._missed(reason or self._other_form(), args, kwargs)

    def _candidates(self, spelling: tuple) -> list[Variant]:
        """The variants that may serve calls with so many positional arguments and these keywords, those with the most
        arguments first: the others serve where some are None."""
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

    def _run(self, variant: Variant, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            self.hits += 1
            return variant.run(leaves)
        places, known = self.state.parameter_places, self.state.parameters
        parameters = [store[key] for store, key in places if store[key] is not None]
        if not needs_gradient(parameters, leaves):
            self.hits += 1
            return variant.run(leaves)
        if variant.region.is_random:
            return self._missed("it draws random numbers, and gradients are wanted", args, kwargs)
        if not all(map(operator.is_, parameters, known)) or len(parameters) != len(known):
            # torch.func.functional_call puts others in place for the time of one call; backward comes later.
            reason = "its parameters are not those it was converted with, and gradients are wanted"
            return self._missed(reason, args, kwargs)

        self.hits += 1

        def original(flat: list[Any]) -> Any:
            with originals():
                return self.original(**variant.region.call.keywords(flat))

        return variant.structured(run_recorded(variant.program.run, original, parameters, leaves))

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the model had before the conversion."""
        if self.own_forward is not None:
            return self.own_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    @property
    def __code__(self):
        """That of the original forward: torch.export reads the names of the arguments from it."""
        return type(self.model).forward.__code__

    def refresh(self) -> None:
        for variant in self.variants:
            variant.program.clear()
        self.stale = False

    def reset_counters(self) -> None:
        self.hits = 0
        self.misses: Counter[str] = Counter()

    def _other_form(self) -> str:
        if not self.variants:
            return "it was pickled, which does not keep fused programs; convert it again or use kfconvert.save"
        forms = " or ".join(f"({', '.join(variant.region.call.names)})" for variant in self.variants)
        return f"the call has other arguments than {forms}"

    def _missed(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.model.training:
            self.ledger.warn(self, reason, stacklevel=5)
        self.misses[reason] += 1
        return self._original_unwatched(args, kwargs)

    def _original_unwatched(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The original forward, whose own writes to attributes of the model are no change of the model."""
        if self.state is None:
            return self.original(*args, **kwargs)
        with self.state.forgetting_writes():
            return self.original(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Programs are built from traced graphs, which do not pickle; the weights and the class of the model do.
        return {"model": self.model, "ledger": self.ledger, "own_forward": self.own_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], [], state["ledger"])
        self.own_forward = state["own_forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedForward:
        duplicate = memo[id(self)] = object.__new__(type(self))
        duplicate.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return duplicate


def install(model: nn.Module, variants: dict[str, list[Variant]], stats: dict[str, Any]) -> Ledger:
    """Give the submodules of ``model`` named in ``variants`` their guarded forwards ("" is the model itself), and the
    model ``kfconvert_info()`` and ``kfconvert_refresh()``; all else stays."""
    ledger = Ledger(model, stats)
    # From the inside out: what watches a module expects the forwards of those within it.
    for path in sorted(variants, key=lambda path: path.count(".") + bool(path), reverse=True):
        module = model.get_submodule(path)
        guarded = ledger.guarded[path] = GuardedForward(module, variants[path], ledger)
        module.__dict__["forward"] = guarded
    model.__dict__["kfconvert_info"] = ledger.info
    model.__dict__["kfconvert_refresh"] = ledger.refresh
    return ledger


def uninstall(model: nn.Module) -> None:
    """Give ``model`` and its submodules their own forwards back; a model that was not converted stays as it is."""
    for module in model.modules():
        guarded = guarded_forward(module)
        if guarded is not None:
            del module.__dict__["forward"]
            if guarded.own_forward is not None:
                module.__dict__["forward"] = guarded.own_forward
        for name in ("kfconvert_info", "kfconvert_refresh"):
            module.__dict__.pop(name, None)


def guarded_forward(model: nn.Module) -> GuardedForward | None:
    """The guarded forward of a converted model, None for any other module."""
    found = model.__dict__.get("forward")
    return found if isinstance(found, GuardedForward) else None
