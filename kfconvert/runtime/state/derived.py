"""Derived: values computed from tensors (folded, packed weights), forgotten when one of those changes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...process import shard_of
from .fingerprint import fingerprints
from .watch import Watch

try:
    # Compiled (csrc/watch.h), at a quarter of the time of the functions below; a state is then a bytes object.
    from ..._C import has_state as _has_state
    from ..._C import tensor_state as _tensor_state
except ImportError:  # kfconvert doctor tells why
    _has_state = _tensor_state = None


class _Values(dict):
    """What was derived from tensors on ``device``, a GPU or else None. An item is there for others, whatever streams
    they use, once the device has finished it."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device | None):
        self.device = device

    def __setitem__(self, key: Any, value: Any) -> None:
        finish(self.device)
        super().__setitem__(key, value)


def finish(device: torch.device | None) -> None:
    """Wait until ``device``, where it is a GPU, has done what was launched on the current stream."""
    if device is not None:
        torch.cuda.current_stream(device).synchronize()


def is_captured(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured on the current stream of ``device``: what is computed now is not there
    before the graph runs."""
    return device is not None and torch.cuda.is_current_stream_capturing()


class Derived:
    """A cache of values that are functions of some source tensors, each of which may be None.

    :meth:`values` returns a dict to read from and to fill. It is a new, empty dict as soon as a source is
    another object than before, lies elsewhere or otherwise in memory (``.to()``, ``.data = ...``), or was written in
    place (its version counter moved: ``load_state_dict``, ``torch.nn.init``, most optimizers), and after a step of any
    ``torch.optim.Optimizer`` that has a source, or memory of one, among its parameters: the fused ones write
    without moving a counter. The check takes 0.1 us, and 0.05 us more for each source. An inference tensor (made
    under ``torch.inference_mode()``) has no counter: its content is compared at each call.

    Other writes leave no trace in a tensor: through ``tensor.data`` (``p.data.add_(1)``), ``tensor.numpy()``, DLPack
    or the storage. Call :meth:`clear` after those, or ask :meth:`overwritten`.

    While a CUDA graph is captured the dict is a copy, so that what is added to it is not there afterwards.

    The sources, and their storage, are kept alive until the next check, so that no other tensor can take their address
    in the meantime. Copies and pickles of this are empty.
    """

    __slots__ = ("__weakref__", "_entry", "_fingerprints", "_unversioned", "_versioned", "conditions")

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._entry: tuple[Any, Any, Any, Any] = (None, None, None, None)
        self.conditions: Watch | None = None  # set by the owner: watches what else the values depend on
        self._fingerprints: list[int] | None = None
        # Whether a source has no version, so that the fingerprints have to be compared at each call.
        self._unversioned = False
        self._versioned = 0
        with _lock:
            _filled.discard(self)

    def values(
        self,
        sources: Sequence[torch.Tensor | None],
        *,
        versioned: int | None = None,
        fingerprinted: bool = False,
        admit: Callable[[Sequence[Any]], None] | None = None,
    ) -> dict:
        """The dict of what was derived from ``sources``, a list or tuple, as they are now.

        Args:
            versioned: in-place writes count for so many of the sources, the first ones, by default for all; the others
                only have to be the same tensors at the same place.
            fingerprinted: take note of what the sources hold, for :meth:`overwritten`.
            admit: called with the sources where they are others than before, and before anything is asked of them; it
                raises where they are none that anything may be derived from.
        """
        values, state, _, _ = self._entry
        if values is not None and _holds(sources, state):
            if is_captured(values.device):
                return dict(values)
            if not (self._unversioned and self.overwritten()):
                return values
        if admit is not None:
            admit(sources)
        known, values = tuple(sources), _Values(next((t.device for t in sources if t is not None and t.is_cuda), None))
        if is_captured(values.device):
            return {}
        self._versioned = versioned = len(known) if versioned is None else versioned
        storages = [tensor.detach() for tensor in known if tensor is not None]
        self._unversioned = any(t is not None and t.is_inference() for t in known[:versioned])
        noted = fingerprinted or self._unversioned
        self._fingerprints = fingerprints(known[:versioned]) if noted else None
        _announce_steps()
        with _lock:
            _filled.add(self)
        self._entry = (values, _tensor_state(known, versioned), known, storages)
        return values

    def note(self) -> None:
        """Take note of what the versioned sources hold now, for :meth:`overwritten`."""
        values, _, known, _ = self._entry
        if values is not None:
            self._fingerprints = fingerprints(known[: self._versioned])

    def overwritten(self) -> bool:
        """Whether a versioned source holds something else than when it was first asked for with ``fingerprinted``:
        somebody has written to it without a trace. Reads all of them."""
        known, noted = self._entry[2], self._fingerprints
        return noted is not None and fingerprints(known[: len(noted)]) != noted

    def __reduce__(self):
        return Derived, ()


def _holds(sources: Sequence[torch.Tensor | None], state: Any) -> bool:
    try:
        return _has_state(sources, state)
    except RuntimeError:  # one that had a version has become an inference tensor, as by torch.utils.swap_tensors
        return False


class Unchanged:
    """``holds_for`` tells whether tensors are those that this was made of, and neither moved nor, unless they may be
    ``written``, written since, as far as that leaves a trace. It keeps them alive, but not their storage."""

    def __init__(self, tensors: Sequence[torch.Tensor], written: bool = False):
        self._tensors = tuple(tensors)
        self._state = _tensor_state(self._tensors, 0 if written else len(self._tensors))

    def holds_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        return _has_state(tensors, self._state)


# The Derived that hold anything: they have to be told of the steps of optimizers.
_filled: "weakref.WeakSet[Derived]" = weakref.WeakSet()
_lock = threading.Lock()


def forget_written(tensors: Iterable[torch.Tensor]) -> None:
    """Have everything forgotten that was derived from one of ``tensors``, or from a tensor that shares memory with one.

    For writes that leave no trace in the tensors.
    """
    with _lock:
        filled = [(derived, derived._entry[3]) for derived in _filled]
    filled = [(derived, storages) for derived, storages in filled if storages]
    if not filled:
        return
    written = set(map(memory_of, tensors))
    for derived, storages in filled:
        if not written.isdisjoint(map(memory_of, storages)):
            derived.clear()


def memory_of(tensor: torch.Tensor) -> Any:
    """The same for tensors that share their memory; that of a distributed tensor is the memory of its shard."""
    try:
        return (tensor if (shard := shard_of(tensor)) is None else shard).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and wrapped tensors have no storage of their own
        return id(tensor)


@torch.compiler.disable
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _filled:
        forget_written(p for group in optimizer.param_groups for p in group["params"])


_announced = False


def _announce_steps() -> None:
    """From the first value on that depends on a tensor, be told of every step of every optimizer."""
    global _announced
    if not _announced:
        _announced = True
        register_optimizer_step_post_hook(_after_step)


# Address, version (None where there is none, or none that counts), and where and how it lies in memory.
TensorState = tuple[int, int | None, Any]


def tensor_state_in_python(tensors: tuple[torch.Tensor | None, ...], versioned: int) -> list[TensorState]:
    """What ``has_state_in_python`` compares with; the version counts for the first ``versioned`` of the tensors."""
    return [
        (id(t), None, None)
        if t is None
        else (id(t), None if index >= versioned or t.is_inference() else t._version, _layout(t))
        for index, t in enumerate(tensors)
    ]


def has_state_in_python(tensors: Sequence[torch.Tensor | None], state: list[TensorState]) -> bool:
    """Whether ``tensors`` are those of ``state``, all of them still alive, and neither moved nor written."""
    return len(tensors) == len(state) and all(
        id(t) == known and (t is None or _layout(t) == layout and (version is None or t._version == version))
        for t, (known, version, layout) in zip(tensors, state)
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of it may be others after ``tensor.data = ...``."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


if _has_state is None:
    _tensor_state, _has_state = tensor_state_in_python, has_state_in_python
