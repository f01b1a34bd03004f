"""Derived: a cache of values computed from tensors (folded, packed weights), cleared when a tensor changes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...process import shard_of
from .fingerprint import fingerprints
from .watch import Watch

try:
    # Compiled (csrc/watch.h), in a quarter of the time of the functions below; a state is then a bytes object.
    from ..._C import has_state as _has_state
    from ..._C import tensor_state as _tensor_state
except ImportError:  # kfconvert doctor reports why
    _has_state = _tensor_state = None


class _Values(dict):
    """Values derived from tensors on ``device``, a GPU or else None. Other streams see an item only after the device
    has finished it."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device | None):
        self.device = device

    def __setitem__(self, key: Any, value: Any) -> None:
        finish(self.device)
        super().__setitem__(key, value)


def finish(device: torch.device | None) -> None:
    """Wait until ``device``, if it is a GPU, has finished the work on the current stream."""
    if device is not None:
        torch.cuda.current_stream(device).synchronize()


def is_captured(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured on the current stream of ``device``: values computed in a capture do not
    exist before the graph runs."""
    return device is not None and torch.cuda.is_current_stream_capturing()


class Derived:
    """A cache of values that are functions of some source tensors, each of which may be None.

    :meth:`values` returns a dict to read from and to fill. The dict is empty again once a source is another object, has
    another address or layout (``.to()``, ``.data = ...``), or was written in place (its version counter moved:
    ``load_state_dict``, ``torch.nn.init``, most optimizers). The same holds after a step of any
    ``torch.optim.Optimizer`` whose parameters include a source or share its memory, as fused optimizers do not move
    counters. The check takes 0.1 us, and 0.05 us more for each source. An inference tensor (created under
    ``torch.inference_mode()``) has no
    counter: each call compares its content.

    Other writes leave no trace in a tensor: through ``tensor.data`` (``p.data.add_(1)``), ``tensor.numpy()``, DLPack
    or the storage. Call :meth:`clear` after such writes, or check :meth:`overwritten`.

    During a CUDA graph capture the dict is a copy, so that additions to it are dropped afterwards.

    The sources and their storage are kept alive until the next check, so that no other tensor can get their address.
    Copies and pickles of this are empty.
    """

    __slots__ = ("__weakref__", "_entry", "_fingerprints", "_unversioned", "_versioned", "conditions")

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self._entry: tuple[Any, Any, Any, Any] = (None, None, None, None)
        self.conditions: Watch | None = None  # set by the owner: watches other dependencies
        self._fingerprints: list[int] | None = None
        # Whether a source has no version, so that each call must compare the fingerprints.
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
        """Return the dict of values derived from ``sources``, a list or tuple, in their current state.

        Args:
            versioned: the number of leading sources for which in-place writes count, by default all; the others only
                have to be the same tensors at the same addresses.
            fingerprinted: record the contents of the sources, for :meth:`overwritten`.
            admit: called with changed sources before any other use; it raises where nothing may be derived from them.
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
        storages = [_holding_storage(tensor) for tensor in known if tensor is not None]
        self._unversioned = any(t is not None and t.is_inference() for t in known[:versioned])
        noted = fingerprinted or self._unversioned
        self._fingerprints = fingerprints(known[:versioned]) if noted else None
        _announce_steps()
        with _lock:
            _filled.add(self)
        self._entry = (values, _tensor_state(known, versioned), known, storages)
        return values

    def note(self) -> None:
        """Record the current contents of the versioned sources, for :meth:`overwritten`."""
        values, _, known, _ = self._entry
        if values is not None:
            self._fingerprints = fingerprints(known[: self._versioned])

    def overwritten(self) -> bool:
        """Whether the content of a versioned source differs from its first record with ``fingerprinted``, so that a
        write has left no trace. Reads all of them."""
        known, noted = self._entry[2], self._fingerprints
        return noted is not None and fingerprints(known[: len(noted)]) != noted

    def __reduce__(self):
        return Derived, ()


def _holding_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps the storage of ``tensor`` alive. A wrapper has none, and its class may not support a detach
    under inference mode."""
    is_wrapper = is_traceable_wrapper_subclass(tensor) and shard_of(tensor) is None
    return tensor if is_wrapper else tensor.detach()


def _holds(sources: Sequence[torch.Tensor | None], state: Any) -> bool:
    try:
        return _has_state(sources, state)
    except RuntimeError:  # a source became an inference tensor, as by torch.utils.swap_tensors
        return False


class Unchanged:
    """``holds_for`` checks whether tensors are the constructor's tensors, without a detectable move or, unless they may
    be ``written``, a detectable write. It keeps them alive, but not their storage."""

    def __init__(self, tensors: Sequence[torch.Tensor], written: bool = False):
        self._tensors = tuple(tensors)
        self._state = _tensor_state(self._tensors, 0 if written else len(self._tensors))

    def holds_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        return _has_state(tensors, self._state)


# Each non-empty Derived, which must be notified of optimizer steps.
_filled: "weakref.WeakSet[Derived]" = weakref.WeakSet()
_lock = threading.Lock()


def forget_written(tensors: Iterable[torch.Tensor]) -> None:
    """Drop all values derived from one of ``tensors``, or from a tensor that shares memory with one.

    Use it for writes that leave no trace in the tensors.
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
    """A key that is equal for tensors with shared memory; for a distributed tensor, its shard's memory."""
    try:
        return (tensor if (shard := shard_of(tensor)) is None else shard).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse and wrapped tensors have no storage
        return id(tensor)


@torch.compiler.disable
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _filled:
        forget_written(p for group in optimizer.param_groups for p in group["params"])


_announced = False


def _announce_steps() -> None:
    """Start to observe all optimizer steps, from the first value on that depends on a tensor."""
    global _announced
    if not _announced:
        _announced = True
        register_optimizer_step_post_hook(_after_step)


def tensor_state_in_python(tensors: Sequence[torch.Tensor | None], versioned: int) -> tuple[int, list[Any]]:
    """The state for ``has_state_in_python``: the identity of each tensor, what ``tensor.data = ...`` may change, and
    the version of the first ``versioned`` of the tensors."""
    return versioned, [
        (id(t), t.data_ptr(), t.shape, t.stride(), t.dtype, index < versioned and not t.is_inference() and t._version)
        if t is not None
        else None
        for index, t in enumerate(tensors)
    ]


def has_state_in_python(tensors: Sequence[torch.Tensor | None], state: tuple[int, list[Any]]) -> bool:
    """Whether ``tensors`` are the tensors of ``state``, all still alive, and neither moved nor written."""
    return tensor_state_in_python(tensors, state[0]) == state


if _has_state is None:
    _tensor_state, _has_state = tensor_state_in_python, has_state_in_python
