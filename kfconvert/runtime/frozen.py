"""What a frozen model still looks at: a sample of its state in each call, everything now and then."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .on_host import OnHost, anchor_of, only_of_original
from .program import Program
from .snapshot import Snapshot

# After so many calls everything that an unfrozen model looks at in each call is looked at once.
LOOK_EVERY = 100


class FrozenError(RuntimeError):
    """A model was frozen, and is changed nevertheless; or it cannot be frozen. The message says what is in the way."""


class Frozen:
    """What the guarded forwards of one frozen model share."""

    def __init__(self, model: nn.Module):
        self.name = type(model).__name__
        self.on_host: OnHost | None = None
        self.snapshot = Snapshot(model)
        # How many calls ran an original forward, which may write attributes of the model.
        self.originals = 0
        # How often tensors have got other memory from here.
        self.moves = 0
        # The first parameter stands for all of them: who trains, loads or exchanges weights leaves out none.
        places = ((m._parameters, key) for m in model.modules() for key, p in m._parameters.items() if p is not None)
        self._store, self._key = next(places, ({}, ""))
        self._sample = self._store.get(self._key)
        self._version = _version(self._sample)

    @property
    def host_bytes(self) -> int:
        """Bytes that lie in the memory of the host and not on the device."""
        return 0 if self.on_host is None else self.on_host.bytes

    def sampled_change(self) -> str | None:
        """What the first parameter of the model shows of a change; in most calls the only one that is looked at."""
        sample = self._store.get(self._key)
        if sample is not self._sample:
            return "its first parameter was replaced"
        return "its first parameter was written" if _version(sample) != self._version else None

    def refused(self, change: str) -> FrozenError:
        """What is raised for a ``change``."""
        change = change.removesuffix("; convert it again")
        return FrozenError(
            f"{self.name} was frozen by kfconvert.freeze, which promises that it does not change: {change}. "
            "copy.deepcopy of it gives a model that may change."
        )

    def to_host(self, model: nn.Module, programs: Sequence[Program], host: torch.device) -> None:
        """Move what none of the ``programs``, which serve the model as a whole, reads to ``host``.

        Raises:
            FrozenError: none of them has run yet.
        """
        if self.host_bytes:
            return
        anchor = anchor_of(model)
        if not any(program.kept_plans() for program in programs):
            raise FrozenError(
                f"nothing is derived from the weights of {self.name} yet: call it with inputs like those that will "
                "come, under torch.no_grad(), before its originals are moved"
            )
        for program in programs:
            program.clear()  # what was noted while plans were made keeps the memory of weights
        if anchor is not None:
            self.on_host = OnHost(only_of_original(model, programs), anchor, host)
            self.moves += 1

    def bring_back(self, reason: str) -> None:
        """Put what lies in the memory of the host back onto the device, as it is needed: ``reason`` tells for what."""
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
        # Copies and pickles of a frozen model are not frozen, and all their tensors lie on one device.
        return _thawed, (self.on_host,)


class Noted:
    """The tensors that a program reads, as they were when this was made. Raises UnfitTensors where one was removed."""

    def __init__(self, program: Program):
        self._program, self._tensors = program, program.tensors()
        self._versions = list(map(_version, self._tensors))
        self._unchanged = program.unchanged()

    def holds(self, moved: bool) -> bool:
        """Whether they are the same, neither written nor, unless they were ``moved``, elsewhere, as far as that leaves
        a trace. Raises as the constructor."""
        tensors = self._program.tensors()
        if not moved:
            return self._unchanged.holds_for(tensors)
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and list(map(_version, tensors)) == self._versions


def _thawed(_: None) -> None:
    """In place of a Frozen in copies: OnHost has put the tensors back already."""


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
