"""What a fused program relies on besides the arguments: structure, modes, attributes, hooks, dtype and device."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from .alike import OF_EVERY_MODULE
from .config_reads import configurations
from .program import Place
from .watch import MISSING, SIZE, Entry, Watch

# What nn.Module itself keeps in its instances, and what this package puts there, is looked at in other ways or not.
_OWN_KEYS = OF_EVERY_MODULE | {"forward", "kfconvert_info", "kfconvert_refresh"}
# Which decide in training only, or how much memory it takes.
_TRAINING_KEYS = frozenset(("gradient_checkpointing", "_gradient_checkpointing_func", "grad_checkpointing"))
_UNWATCHED = _OWN_KEYS | _TRAINING_KEYS


class ModelState:
    """Tells whether a model is still as it was when this was made, as far as its programs depend on it.

    Weights may change freely. Of plain attributes (numbers, strings, functions) the very objects are watched, so that
    a change within a list or a dict is not seen; of the configurations only the ``settings`` that the forward reads.
    """

    def __init__(self, model: nn.Module, settings: Iterable[str]):
        self.root = model
        self.fixed, self.fixed_reasons = _watched(*_structure(model), *_modes(model))
        self.attributes, self.attribute_reasons = _watched(*_attributes(model), *_settings(model, settings))
        stores = [module._parameters for module in model.modules()]
        self.parameter_places = [(store, key) for store in stores for key, p in store.items() if p is not None]
        self.parameters = [store[key] for store, key in self.parameter_places]
        self.hooked = inner_hook(model)
        self.hooks_seen = RemovableHandle.next_id
        floating = [p for p in model.parameters() if p.is_floating_point()]
        self.samples = [(t, t.dtype, t.device) for t in floating[:1] + floating[-1:]]
        self.tied = _tied_places(model)
        self.autocast_type = self.samples[0][2].type if self.samples else "cpu"

    def refusal(self) -> str | None:
        """None where everything is as it was, else what is not."""
        changed = self.fixed.first_change()
        if changed is not None:
            return self.fixed_reasons[changed]
        changed = self._changed_attributes()
        if changed:
            return self.attribute_reasons[changed[0]]
        for tensor, dtype, device in self.samples:
            if tensor.dtype is not dtype or tensor.device != device:
                return f"the model was moved to {tensor.dtype} on {tensor.device}; convert it again"
        for (store, key), *others in self.tied:
            if any(other[name] is not store[key] for other, name in others):
                return f"weights that were tied ({key}) are no longer"
        if torch.is_autocast_enabled(self.autocast_type):
            return "autocast is on"
        if self.hooks_seen != RemovableHandle.next_id or self.hooked:
            self.hooks_seen = RemovableHandle.next_id
            self.hooked = inner_hook(self.root) or self._replaced_parameter()
            return self.hooked
        return None

    def _replaced_parameter(self) -> str | None:
        """What may come with a hook: a parameter that is computed from others, or gathered for the time of a call."""
        if any(key not in store for store, key in self.parameter_places):
            return "a parameter was removed after the conversion (as by weight_norm or pruning); convert it again"
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        current = [store[key] for store, key in self.parameter_places]
        if distributed and not all(map(operator.is_, current, self.parameters)):
            # FSDP2 gathers the new weights into the same tensors, at times at the same address, and keeps their
            # version counters: what was derived from the old weights could not be told from what is valid.
            return "its parameters were replaced after the conversion, in a distributed run (as by fully_shard)"
        return None

    @contextmanager
    def forgetting_writes(self) -> Iterator[None]:
        """Around a run of the original forward: attributes that it writes are its own affair, and no longer watched."""
        before = self._changed_attributes()
        yield
        for index in reversed(self._changed_attributes()):
            if index not in before:
                self._set_attribute(index)

    def _changed_attributes(self) -> list[int]:
        """The indices of attributes with another value; those that were given an equal value are watched anew."""
        changed = []
        if self.attributes.first_change() is not None:
            for index, (holder, key, expected) in enumerate(self.attributes.entries):
                value = vars(holder).get(key, MISSING)
                if value is not expected and _equal(value, expected):
                    self._set_attribute(index, (holder, key, value))
                elif value is not expected:
                    changed.append(index)
        return changed

    def _set_attribute(self, index: int, *entry: Entry) -> None:
        """Watch ``entry``, or nothing, in the place of the one at ``index``."""
        entries = self.attributes.entries
        self.attributes = Watch((*entries[:index], *entry, *entries[index + 1 :]))
        self.attribute_reasons[index : index + 1] = [self.attribute_reasons[index]] * len(entry)


def _watched(*found: tuple[Entry, str]) -> tuple[Watch, list[str]]:
    return Watch(entry for entry, _ in found), [reason for _, reason in found]


def _equal(value: Any, other: Any) -> bool:
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:  # values of any kind may stand there, which compare as they like
        return False


def _structure(model: nn.Module) -> Iterator[tuple[Entry, str]]:
    reason = "a submodule or its forward was replaced after the conversion; convert it again"
    for module in model.modules():
        yield (module._modules, SIZE, len(module._modules)), reason
        for name, child in module._modules.items():
            yield (module._modules, name, child), reason
        if module is not model:
            yield (module, "forward", vars(module).get("forward", MISSING)), reason


def _modes(model: nn.Module) -> Iterator[tuple[Entry, str]]:
    for module in model.modules():
        name = "the model" if module is model else f"a {type(module).__name__} inside the model"
        yield (module, "training", False), f"{name} is in train mode"


def _attributes(model: nn.Module) -> Iterator[tuple[Entry, str]]:
    # Tensors among the attributes are read anew in every call, those that several modules have at one place only.
    holders = Counter(id(tensor) for module in model.modules() for tensor in _tensors(module))
    for path, module in model.named_modules():
        own = {} if isinstance(module, _DropoutNd) else vars(module)
        for key, value in own.items():
            if key not in _UNWATCHED and not (isinstance(value, Tensor) and holders[id(value)] == 1):
                name = f"{path}.{key}" if path else key
                yield (module, key, value), f"the attribute {name} was changed after the conversion; convert it again"


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for store in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in store.values() if isinstance(value, Tensor))


def _settings(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[Entry, str]]:
    for config in configurations(model):
        for name in sorted(names):
            reason = f"{name} in the configuration of the model was changed after the conversion; convert it again"
            yield (config, name, vars(config).get(name, MISSING)), reason


def _tied_places(model: nn.Module) -> list[list[Place]]:
    """The groups of places that hold one and the same tensor; a region reads each group at one place only."""
    groups: dict[int, list[Place]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    groups.setdefault(id(tensor), []).append((store, key))
    return [places for places in groups.values() if len(places) > 1]


def inner_hook(model: nn.Module) -> str | None:
    """Why a program of ``model`` would leave out hooks of its submodules; None where there are none."""
    for name, module in model.named_modules():
        if module is not model and has_hooks(module):
            return f"{name} has hooks, which a fused program would not call"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has hooks that its ``__call__`` runs around its forward."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    # transformers leaves its recording hooks in place after a call with output_hidden_states=True. They do
    # nothing in calls that do not ask for it, and one that asks has other arguments or another config.
    idle = "transformers.utils.output_capturing"
    return any(getattr(hook, "__module__", None) != idle for kind in kinds for hook in kind.values())
