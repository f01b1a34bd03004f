"""Frozen models: each call checks a sample of the model's state, and one call in many checks all of it."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..recording.program import Program
from .on_host import OnHost, anchor_of, only_of_original

_Model = TypeVar("_Model", bound=nn.Module)
# After so many calls, one call runs all checks of an unfrozen model.
LOOK_EVERY = 100


class FrozenError(RuntimeError):
    """A frozen model was changed, or a model cannot be frozen. The message gives the reason."""


def freeze(model: _Model, originals: str | None = None) -> _Model:
    """Freeze the weights, modules, attributes and code of a converted ``model``; returns ``model``.

    A call then checks its arguments, the mode of the model and its first parameter. It also checks the modes and
    switches of the process: gradients, autocast, default dtype and device, global module hooks, active modes. Calls
    without a matching program run the original forward as before.

    A change raises :class:`FrozenError`. At once: ``kfconvert_refresh()``. At the next call: train mode, and a first
    parameter that was replaced, moved, cast or written, as every step of an optimizer and ``load_state_dict()`` do.
    Within 100 calls: any other change that an unfrozen model detects; until then a call may mix the old and the new
    state. An original forward may write attributes, such as a table for another image size: later calls run the
    original forward until the attributes have their former values.

    ``state_dict()``, ``kfconvert.save`` and ``kfconvert_info()`` still work; under "frozen", the latter has the number
    of bytes in host memory. Deep copies and loaded models are converted, but not frozen. A model without fusions does
    not change.

    Args:
        model: a converted model in eval mode.
        originals: with "cpu", parameters and buffers that only the original forward needs move to host memory: the
            program has folded or packed them, or does not read them. They stay the same objects. The
            first tensor of the model stays on its device, so ``model.device`` does not change. Call the model on
            typical inputs before. A call without a matching program, gradients, a new layout of images, compilers and
            ``copy.copy`` move the tensors back, with one warning; then ``freeze`` may be called again. Nothing moves
            where the model is on the CPU, or was converted in parts only. No other thread may call the model then.

    Raises:
        FrozenError: the model has changed since its conversion, is in train mode, was unpickled, or, with
            ``originals``, has not been called.
        ValueError: it was not converted, or ``originals`` is neither None nor "cpu".
    """
    if originals not in (None, "cpu"):
        raise ValueError(f"originals must be None or 'cpu', not {originals!r}")
    if not isinstance(model, nn.Module) or "kfconvert_info" not in vars(model):
        raise ValueError(f"freeze takes a converted model, not {type(model).__name__}")
    guarded: dict[str, Any] = vars(model)["kfconvert_info"].__self__.guarded
    if not guarded:
        return model
    frozen = next(iter(guarded.values())).frozen
    if frozen is None:
        for forward in guarded.values():
            reason = forward.state.change() if forward.state else forward.other_form()
            if reason is not None:
                raise FrozenError(f"{type(model).__name__} cannot be frozen: {reason}")
        frozen = Frozen(model)
        for forward in guarded.values():
            forward.freeze(frozen)
    whole, anchor = guarded.get(""), anchor_of(model)
    if originals is not None and whole is not None and anchor is not None and anchor.device.type != originals:
        frozen.to_host(model, [variant.program for variant in whole.variants], torch.device(originals))
    return model


class Frozen:
    """The state that the guarded forwards of one frozen model share."""

    def __init__(self, model: nn.Module):
        self.name = type(model).__name__
        self.on_host: OnHost | None = None
        # The number of calls that ran an original forward, which may write attributes of the model.
        self.originals = 0
        # The number of times that this object has moved tensors.
        self.moves = 0
        # Training, loading and swapping weights always touch every parameter, so checking the first is enough.
        places = ((m._parameters, key) for m in model.modules() for key, p in m._parameters.items() if p is not None)
        self._store, self._key = next(places, ({}, ""))
        self._sample = self._store.get(self._key)
        self._kind = self._kind_of_sample()

    @property
    def host_bytes(self) -> int:
        """The number of bytes in host memory instead of on the device."""
        return 0 if self.on_host is None else self.on_host.bytes

    def sampled_change(self) -> str | None:
        """Describe a change of the model's first parameter; most calls check no other one."""
        if self._store.get(self._key) is not self._sample:
            return "its first parameter was replaced"
        return "its first parameter was written, moved or cast" if self._kind_of_sample() != self._kind else None

    def _kind_of_sample(self) -> tuple[Any, ...]:
        sample = self._sample
        return () if sample is None else (_version(sample), sample.dtype, sample.device)

    def refused(self, change: str) -> FrozenError:
        """Return the error for a ``change``."""
        change = change.removesuffix("; convert it again")
        return FrozenError(
            f"{self.name} was frozen by kfconvert.freeze, which promises that it does not change: {change}. "
            "copy.deepcopy returns a model that may change."
        )

    def to_host(self, model: nn.Module, programs: Sequence[Program], host: torch.device) -> None:
        """Move the tensors that none of ``programs``, the programs of the whole model, reads to ``host``.

        Raises:
            FrozenError: no program has run yet.
        """
        if self.host_bytes:
            return
        anchor = anchor_of(model)
        if not any(program.kept_plans() for program in programs):
            raise FrozenError(
                f"no program of {self.name} has run yet: call it on typical inputs under torch.no_grad() before its "
                "originals are moved"
            )
        for program in programs:
            program.clear()  # records of planning keep the memory of weights
        if anchor is not None:
            self.on_host = OnHost(only_of_original(model, programs), anchor, host)
            self.moves += 1

    def bring_back(self, reason: str) -> None:
        """Move tensors from host memory back to the device; the warning gives the ``reason``."""
        if not self.host_bytes or self.on_host is None:
            return
        size = self.host_bytes
        if self.on_host.bring_back():
            self.moves += 1
            warnings.warn(
                f"kfconvert: {size / 2**20:.1f} MiB of weights of {self.name}, which kfconvert.freeze has moved to "
                f"host memory, are back on the device and stay there: {reason}.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __reduce__(self):
        # Copies and pickles of a frozen model are not frozen, and all their tensors are on one device.
        return _thawed, (self.on_host,)


class Noted:
    """The tensors that a program reads, as recorded by the constructor. Raises UnfitTensors where one was removed."""

    def __init__(self, program: Program):
        self._program, self._tensors = program, program.tensors()
        self._versions = list(map(_version, self._tensors))
        self._unchanged = program.unchanged()

    def holds(self, moved: bool) -> bool:
        """Whether they are the same tensors without detectable writes and, unless they were ``moved``, at the same
        addresses. Raises as the constructor."""
        tensors = self._program.tensors()
        if not moved:
            return self._unchanged.holds_for(tensors)
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and list(map(_version, tensors)) == self._versions


def _thawed(_: None) -> None:
    """Return None, which replaces a Frozen in copies: OnHost has already moved the tensors back."""


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
