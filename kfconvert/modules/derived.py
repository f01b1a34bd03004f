"""Derived: values computed from tensors (folded, packed weights), forgotten when one of those changes."""

from collections.abc import Sequence

import torch

try:
    # Compiled (csrc/watch.h), at a quarter of the time of the functions below; a state is then a bytes object.
    from kfconvert._C import has_state as _has_state
    from kfconvert._C import tensor_state as _tensor_state
except ImportError:  # kfconvert doctor tells why
    _has_state = _tensor_state = None


class Derived:
    """A cache of values that are functions of some source tensors, each of which may be None.

    :meth:`values` returns a dict to read from and to fill. It is a new, empty dict as soon as a source is
    another object than before, lies elsewhere in memory (``.to()``, ``.data = ...``), or was written in place
    (its version counter moved: optimizer steps, ``load_state_dict``). The check takes 0.1 us, and 0.05 us more
    for each source.

    Two writes leave no trace in a tensor: through ``tensor.data`` (``p.data.add_(1)``), and to an inference
    tensor (made under ``torch.inference_mode()``, it has no version counter). Call :meth:`clear` after those.

    The sources, and their storage, are kept alive until the next check: only so can their address not be
    taken by another tensor in the meantime. Pickled and deep-copied empty.
    """

    __slots__ = ("_entry",)

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._entry = (None, None, None, None)

    def values(self, sources: Sequence[torch.Tensor | None]) -> dict:
        """The dict of what was derived from ``sources``, a list or tuple, as they are now."""
        values, state, _, _ = self._entry
        if values is not None and _has_state(sources, state):
            return values
        known, values = tuple(sources), {}
        storages = [tensor.detach() for tensor in known if tensor is not None]
        self._entry = (values, _tensor_state(known), known, storages)
        return values

    def __reduce__(self):
        return Derived, ()


# Address, version (None for an inference tensor, which has none) and data pointer.
Record = tuple[int, int | None, int]


def tensor_state_in_python(tensors: tuple[torch.Tensor | None, ...]) -> list[Record]:
    """What ``has_state_in_python`` compares with."""
    return [(id(t), None, 0) if t is None else (id(t), None if t.is_inference() else t._version, t.data_ptr())
            for t in tensors]


def has_state_in_python(tensors: Sequence[torch.Tensor | None], state: list[Record]) -> bool:
    """Whether ``tensors`` are those of ``state``, all of them still alive, and neither moved nor written."""
    return len(tensors) == len(state) and all(
        id(t) == known and (t is None or t.data_ptr() == pointer and (version is None or t._version == version))
        for t, (known, version, pointer) in zip(tensors, state))


if _has_state is None:
    _tensor_state, _has_state = tensor_state_in_python, has_state_in_python
