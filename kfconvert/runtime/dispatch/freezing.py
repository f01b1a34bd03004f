"""Frozen models: each call checks a sample of the model's state, and one call in many checks all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from ..recording.program import Program
from ..recording.program_errors import Fallback
from ..state.model_state import ModelState

_Model = TypeVar("_Model", bound=nn.Module)
# After so many calls, one call runs all checks of an unfrozen model.
CHECK_EVERY = 100


class FrozenError(RuntimeError):
    """Raised if a frozen model was changed, or a model cannot be frozen. The message has the reason."""


def freeze(model: _Model) -> _Model:
    """Freeze the weights, modules, attributes and code of a converted ``model``; returns ``model``.

    A call then checks its arguments, the mode of the model and its first parameter. It also checks the modes and
    switches of the process: gradients, autocast, default dtype and device, global module hooks, active modes. Calls
    without a matching program run the original forward as before.

    A change raises :class:`FrozenError`. ``kfconvert_refresh()`` raises it immediately. The next call raises it in
    train mode, or if the first parameter was replaced, moved, cast or written, as by ``load_state_dict()``.
    Any other change that an unfrozen model detects raises it within 100 calls. Until then, a call may mix the old and
    the new state. If an original forward writes attributes, such as a table for another image size, later calls run the
    original forward until the attributes have their former values.

    ``state_dict()``, ``kfconvert.save`` and ``kfconvert_info()`` still work. Deep copies and loaded models are
    converted, but not frozen. A model without fusions does not change.

    Args:
        model: a converted model in eval mode.

    Raises:
        FrozenError: the model has changed since its conversion, is in train mode, or was unpickled.
        ValueError: it was not converted.
    """
    if not isinstance(model, nn.Module) or "kfconvert_info" not in vars(model):
        raise ValueError(f"freeze takes a converted model, not {type(model).__name__}")
    every: list[Any] = list(vars(model)["kfconvert_info"].__self__.guarded.values())
    guarded = [forward for forward in every if forward.is_converted]
    if any(forward.frozen is not None for forward in guarded):
        return model
    for forward in guarded:
        reason = forward.state.change() if forward.state else forward.other_form()
        if reason is not None:
            raise FrozenError(f"{type(model).__name__} cannot be frozen: {reason}")
    sample = Sample(model)
    for forward in guarded:
        forward.freeze(sample)
    return model


class Sample:
    """The first parameter of a frozen model, which each call of its guarded forwards checks. Training, loading and
    swapping weights always touch every parameter."""

    def __init__(self, model: nn.Module):
        self.model_name = type(model).__name__
        # The number of calls that ran an original forward, which may write attributes of the model.
        self.originals = 0
        places = ((m._parameters, key) for m in model.modules() for key, p in m._parameters.items() if p is not None)
        self._store, self._key = next(places, ({}, ""))
        self._parameter = self._store.get(self._key)
        self._kind = _kind(self._parameter)

    def change(self) -> str | None:
        """Describe a change of the parameter; None where there is none."""
        if self._store.get(self._key) is not self._parameter:
            return "its first parameter was replaced"
        return "its first parameter was written, moved or cast" if _kind(self._parameter) != self._kind else None

    def refused(self, change: str) -> FrozenError:
        """Return the error for a ``change``."""
        change = change.removesuffix("; convert it again")
        return FrozenError(
            f"{self.model_name} was frozen by kfconvert.freeze and must not change: {change}. "
            "copy.deepcopy returns a model that may change."
        )


class Frozen:
    """The checks of one guarded forward of a frozen model."""

    def __init__(self, sample: Sample, state: ModelState, programs: Sequence[Program]):
        self.sample, self._state, self._programs = sample, state, programs
        self._tensors = [program.unchanged() for program in programs]
        self._originals, self._unchecked = sample.originals, 0

    def refusal(self, training: bool) -> str | None:
        """The reason why the model must run its original forward, None where a program may serve. An original forward
        may have written attributes: after it, every call runs all checks until the state is restored.

        Raises:
            FrozenError: the call detects that the model has changed since it was frozen.
        """
        change = "it is in train mode" if training else self.sample.change()
        if change is not None:
            raise self.sample.refused(change)
        if self._originals != self.sample.originals:
            change = self._state.change()
            if change is not None:
                return change
            self._originals = self.sample.originals
        self._unchecked += 1
        if self._unchecked >= CHECK_EVERY:
            self.check()
        return self._state.circumstance()

    def check(self) -> None:
        """Raises FrozenError where any checked value has changed since the model was frozen."""
        change = self._state.change() or self._written()
        if change is not None:
            self._unchecked = CHECK_EVERY  # so that the next call checks again
            raise self.sample.refused(change)
        self._unchecked = 0

    def _written(self) -> str | None:
        """Describe a tensor that was replaced, moved or written; None where there is none."""
        try:
            same = all(known.holds_for(each.tensors()) for known, each in zip(self._tensors, self._programs))
        except Fallback as error:
            return str(error)
        return None if same else "a weight or buffer was replaced or written"


def _kind(parameter: Tensor | None) -> tuple[Any, ...]:
    if parameter is None:
        return ()
    return -1 if parameter.is_inference() else parameter._version, parameter.dtype, parameter.device
