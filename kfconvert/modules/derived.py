"""Derived: values computed from tensors (folded, packed weights), forgotten when one of those changes."""

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

_pointer = torch.Tensor.data_ptr
_version = attrgetter("_version")


class Derived:
    """A cache of values that are functions of some source tensors.

    :meth:`values` returns a dict to read from and to fill. It is a new, empty dict as soon as a source is
    another object than before, lies elsewhere in memory (``.to()``, ``.data = ...``), or was written in place
    (its version counter moved: optimizer steps, ``load_state_dict``). The check takes 1 to 2 us.

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
        self._entry = ((), (), (), (), (), None)

    def values(self, sources: Sequence[torch.Tensor]) -> dict:
        """The dict of what was derived from ``sources`` as they are now."""
        known, pointers, versioned, versions, _, values = self._entry
        if (values is not None and len(sources) == len(known) and all(map(is_, sources, known))
                and pointers == [*map(_pointer, sources)] and versions == [*map(_version, versioned)]):
            return values
        known = tuple(sources)
        versioned = [tensor for tensor in known if not tensor.is_inference()]
        values = {}
        self._entry = (known, [*map(_pointer, known)], versioned, [*map(_version, versioned)],
                       [tensor.detach() for tensor in known], values)
        return values

    def __reduce__(self):
        return Derived, ()
