"""The dependencies of a fused program besides the arguments: structure, modes, attributes, code and hooks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ...region import Read
from ...torch_state import autocast_dtype
from .code_state import Codes
from .configuration import WHOLE
from .contents import Contents, first_different, is_alike
from .fingerprint import may_fetch
from .hooks import FORWARD_HOOKS, global_hook, inner_hook
from .output_recording import has_recording_hooks, recorded_outputs
from .references import Holdings, configurations
from .watch import SIZE, Places, Watch
from .watched_places import (
    REPLACED,
    entries_of_attributes,
    entries_of_children,
    entries_of_modes,
    entries_of_settings,
    entries_of_sizes,
    entries_of_structure,
    is_own_forward,
    is_same_layout,
    layout,
    tied_places,
)
from .weak_module import WeakModule

# Properties that code reads in order to behave differently when gradients are required. Traces run without gradients.
_OF_GRADIENTS = frozenset(("is_grad_enabled", "requires_grad", "grad_fn", "is_leaf"))


class ModelState:
    """Checks whether a model has changed since construction, as far as its programs depend on it.

    Weights may change freely, and so may values that the trace did not read (``reads``). Objects that it read are
    compared by identity. Equal values, containers and tensors may replace one, and are watched from then on.

    ``announced`` is set where a module with weights was written since the last check, as ``train()`` and ``eval()`` do:
    its weights may have been written without a trace.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[Read],
        slots: Collection[tuple[str, str]] = (),
        codes: Codes | None = None,
        autocast: tuple[str, torch.dtype] | None = None,
    ):
        """``slots``: path and name of each tensor that the programs read again in every call; ``codes``: the code of
        other modules, to be shared; ``autocast``: its device type and dtype in the trace, None if it was off."""
        self._root = WeakModule(model)
        self._class = type(model)
        reads = frozenset(reads)
        self.owners = Places(entries_of_modes(model, owners=True))
        self._layout = layout(model)
        self.children: Watch
        self._watch_children()
        self.tied = tied_places(model)
        stores = [module._parameters for module in model.modules()]
        self.parameter_places = [(store, key) for store in stores for key, p in store.items() if p is not None]
        self.parameters = [store[key] for store, key in self.parameter_places]
        held = Holdings(model)
        self.code = (Codes() if codes is None else codes).of(held, reads)
        fixed = [*entries_of_structure(model), *entries_of_modes(model, owners=False)]
        if any(isinstance(read, tuple) and read[1] in WHOLE for read in reads):
            fixed += entries_of_sizes(model)
        self.fixed = Places(fixed, is_own_forward)
        self._reads, self._slots = reads, slots
        self._watch_attributes(held.configurations)
        self.asks_for_gradients = next(iter(sorted(_OF_GRADIENTS & self.code.asked_for)), None)
        self._watch_hooks()
        floating = (parameter.device.type for parameter in model.parameters() if parameter.is_floating_point())
        self._autocast = autocast or (next(floating, "cpu"), None)
        self.default_dtype = torch.get_default_dtype()
        self.is_parametrized = any(map(parametrize.is_parametrized, model.modules()))
        # Whether the next check compares tensors without a detectable write.
        self.closely = False
        self.begin()

    def begin(self) -> None:
        """Ignore all writes so far, which the conversion itself has made."""
        for places in (self.owners, self.fixed, self.attributes):  # resolves the attribute dicts
            places.watch.first_change(vars(self._root()))
        self.announced = False

    def refusal(self) -> str | None:
        """The reason why the program must not run, None where nothing has changed."""
        return self.change() or self.circumstance()

    def change(self) -> str | None:
        """The change of the model, or of the code behind it; None where there is none."""
        model = self._root()
        root = vars(model)
        reason = self.owners.change(root)
        if self.owners.watch.written:
            self.announced = True
        if reason is not None:
            return reason
        if self.replaced():
            return REPLACED
        reason = self.fixed.change(root)
        if reason is not None:
            return reason
        if type(model) is not self._class:
            return "the class of the model was changed after the conversion; convert it again"
        closely = (self.closely or self.announced) and may_fetch()
        if closely:
            self.closely = False
        reason = first_different(self.compared, closely)
        if reason is not None:
            return reason
        reason = self._changed_attribute(root) or self.code.refusal()
        if reason is not None:
            return reason
        for (store, key), *others in self.tied:
            if any(other.get(name) is not store.get(key) for other, name in others):
                return f"weights that were tied ({key}) are no longer tied"
        if self.hooks.first_change() is not None or self.hooks.written:
            self._watch_hooks()
        return self.hooked

    def circumstance(self) -> str | None:
        """The circumstance of this call that forbids the program: a process switch, global module hooks, or an outer
        call that records outputs of submodules; None where there is none."""
        reason = self.code.switched()
        if reason is not None:
            return reason
        kind, expected = self._autocast
        if (dtype := autocast_dtype(kind)) is not expected:
            now, then = (str(each or "off").removeprefix("torch.") for each in (dtype, expected))
            return f"autocast is {now}; at conversion it was {then}"
        if torch.get_default_dtype() is not self.default_dtype:
            return f"the default dtype is {torch.get_default_dtype()}; at conversion it was {self.default_dtype}"
        if self.is_parametrized and parametrize._cache_enabled:
            return "parametrize.cached() caches weights, which a fused program would recompute"
        reason = global_hook()
        if reason is not None:
            return reason
        recorded = recorded_outputs() if self.is_recorded else None
        return f"hooks record {', '.join(recorded)}, which a fused program would not call" if recorded else None

    def replaced(self) -> bool:
        """Whether a submodule was replaced, added or removed."""
        model = self._root()
        if self.children.first_change(vars(model)) is not None or self.children.written:
            # Code that wraps and unwraps modules, such as adapters, may have written their weights.
            self.announced = True
            # A dict of submodules was written or replaced: their order counts, the identity of the dict does not.
            if not is_same_layout(layout(model), self._layout):
                self.children = Watch(self.children.entries)  # checks again at the next call
                return True
            self._watch_children()
        return False

    def _watch_children(self) -> None:
        model = self._root()
        self.children = Watch(entry for module in model.modules() for entry in entries_of_children(module, model))
        self.children.first_change(vars(model))

    def _watch_hooks(self) -> None:
        model = self._root()
        kinds = (vars(module)[kind] for module in model.modules() for kind in FORWARD_HOOKS)
        self.hooks = Watch((hooks, SIZE, len(hooks)) for hooks in kinds)
        self.hooks.first_change()
        self.hooked = inner_hook(model) or self._replaced_parameter()
        self.is_recorded = has_recording_hooks(module for module in model.modules() if module is not model)

    @property
    def hooked_backward(self) -> str | None:
        """The reason why a program would skip hooks around the backward passes of submodules; None without any."""
        return inner_hook(self._root(), of_gradients=True)

    def _replaced_parameter(self) -> str | None:
        """The reason why a replaced parameter forbids the program, as in a distributed run, where a hook may gather
        parameters for one call; else None."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        current = [store.get(key) for store, key in self.parameter_places]
        if distributed and not all(map(operator.is_, current, self.parameters)):
            # FSDP2 gathers new weights into the same tensors, sometimes at the same address, and keeps their version
            # counters: values derived from the old weights would still look valid.
            return "its parameters were replaced after the conversion, in a distributed run (as by fully_shard)"
        return None

    def _watch_attributes(self, of_model: list[Any]) -> None:
        model = self._root()
        contents = Contents(model)
        attributes = entries_of_attributes(model, self._reads, self._slots, contents)
        settings = entries_of_settings(of_model, self._reads, contents)
        self.attributes = Places((*attributes, *settings), is_alike)
        self.compared = contents.compared

    def _changed_attribute(self, root: dict[str, Any]) -> str | None:
        """The reason why a changed attribute forbids the program; None where it does not, as its value is equal."""
        before = self.attributes.watch
        reason = self.attributes.change(root)
        if reason is None and self.attributes.watch is not before:
            self._watch_attributes(configurations(self._root()))  # for the contents of equal containers
        return reason
