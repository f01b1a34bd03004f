"""What a fused program relies on besides the arguments: the model's structure, modes, attributes, hooks, dtype, device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .program import Place
from .watch import MISSING, SIZE, Entry, Watch

# What nn.Module itself keeps in its instances, and what this package puts there, is looked at in other ways or not.
_OWN_KEYS = frozenset(vars(nn.Module())) | {"forward", "kfconvert_info", "kfconvert_refresh"}


class ModelState:
    """Tells whether a model is still as it was when this was made, as far as its programs depend on it.

    Weights may change freely. Of plain attributes (numbers, strings, functions, the configuration) the very objects
    are watched, so that a change within a list or a dict is not seen.
    """

    def __init__(self, model: nn.Module):
        self.root = model
        self.config = getattr(model, "config", None)
        self.fixed, self.fixed_reasons = _watched(*_structure(model), *_modes(model))
        self.attributes, self.attribute_reasons = _watched(*_attributes(model), *_configuration(self.config))
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
        changed = self._changed_attribute()
        if changed is not None:
            return self.attribute_reasons[changed]
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
            self.hooked = inner_hook(self.root)
            return self.hooked
        return None

    @contextmanager
    def forgetting_writes(self) -> Iterator[None]:
        """Around a run of the original forward: attributes that it writes are its own affair, and no longer watched."""
        was_equal = self._changed_attribute() is None
        yield
        while was_equal and (changed := self._changed_attribute()) is not None:
            self._set_attribute(changed)

    def _changed_attribute(self) -> int | None:
        """The index of the first attribute with another value; one that was given an equal value is watched anew."""
        changed = self.attributes.first_change()
        while changed is not None:
            holder, key, expected = self.attributes.entries[changed]
            if key is SIZE or key not in vars(holder) or not _equal(vars(holder)[key], expected):
                return changed
            self._set_attribute(changed, (holder, key, vars(holder)[key]))
            changed = self.attributes.first_change()
        return None

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
    # Tensors among the attributes are read anew in every call.
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN_KEYS and not isinstance(value, Tensor):
                name = f"{path}.{key}" if path else key
                yield (module, key, value), f"the attribute {name} was changed after the conversion; convert it again"


def _configuration(config: Any) -> Iterator[tuple[Entry, str]]:
    reason = "model.config was changed after the conversion"
    if hasattr(config, "__dict__"):
        yield (config, SIZE, len(vars(config))), reason
        for key, value in vars(config).items():
            yield (config, key, value), reason


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
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        hooks = [hook for kind in kinds for hook in kind.values()]
        # transformers leaves its recording hooks in place after a call with output_hidden_states=True. They do
        # nothing in calls that do not ask for it, and one that asks has other arguments or another config.
        idle = {"transformers.utils.output_capturing"}
        if module is not model and {getattr(hook, "__module__", None) for hook in hooks} - idle:
            return f"{name} has hooks, which a fused program would not call"
    return None
