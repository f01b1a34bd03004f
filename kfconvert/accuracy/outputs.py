"""The leaves of a model's nested output, by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Outputs:
    """The leaves of an output by path, and their containers.

    Leaves include tensors in tuples, lists, mappings and attributes of objects (dataclasses, key-value caches), so that
    tensors in containers without pytree registration are compared, too.
    """

    def __init__(self, outputs: Any):
        self.leaves: dict[str, Any] = {}
        self.containers: dict[str, type] = {}
        self._visiting: set[int] = set()
        self._add("", outputs)

    def _add(self, path: str, value: Any) -> None:
        if isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        elif not isinstance(value, Tensor) and hasattr(type(value), "__array__"):
            value = torch.as_tensor(value)
        if value is None or isinstance(value, (Tensor, str, bytes, int, complex)):
            self.leaves[path] = value
            return
        children = _children(value)
        if children is None or id(value) in self._visiting:
            return
        self.containers[path] = type(value)
        self._visiting.add(id(value))
        for key, child in children:
            self._add(path + key, child)
        self._visiting.discard(id(value))

    def difference(self, other: Outputs) -> str | None:
        """Returns the first difference in structure of `other`, or None."""
        if self.leaves.keys() != other.leaves.keys():
            missing = [name or "itself" for name in self.leaves if name not in other.leaves]
            extra = [name or "itself" for name in other.leaves if name not in self.leaves]
            return f"the outputs have another structure: missing {missing[:5]}, unexpected {extra[:5]}"
        for path, container in self.containers.items():
            if other.containers.get(path) is not container:
                theirs = getattr(other.containers.get(path), "__name__", "nothing")
                return f"output{path} is a {theirs}, the original's is a {container.__name__}"
        return None


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The (path piece, child) pairs of a container; None for opaque values."""
    if isinstance(value, Mapping):
        return ((f".{key}", child) for key, child in value.items())
    if isinstance(value, (tuple, list)):
        return ((f"[{index}]", child) for index, child in enumerate(value))
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        return ((f".{key}", child) for key, child in vars(value).items())
    return None


def is_close(expected: Any, actual: Any, tolerances: Mapping[torch.dtype, float], share: float = 1.0) -> bool:
    """Whether two outputs differ only by rounding.

    Args:
        tolerances: the largest error for each floating-point dtype, relative to the largest value of ``expected``. For
            complex tensors the dtype of their parts counts; tensors of other dtypes must be equal.
        share: the share of the tolerance that is allowed.
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return expected is actual or (type(expected) is type(actual) and expected == actual)
    if expected.shape != actual.shape or expected.dtype is not actual.dtype:
        return False
    if expected.is_complex():
        expected, actual = (torch.view_as_real(each.resolve_conj()) for each in (expected, actual))
    if expected.dtype not in tolerances:
        return torch.equal(expected, actual)
    scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    tolerance = share * tolerances[expected.dtype] * (scale or 1.0)
    return torch.allclose(actual, expected, rtol=0, atol=tolerance, equal_nan=True)


def are_close(
    expected: Sequence[Any], actual: Sequence[Any], tolerances: Mapping[torch.dtype, float], share: float = 1.0
) -> bool:
    """Whether two calls have as many outputs, which differ only by rounding; see ``is_close``."""
    return len(expected) == len(actual) and all(is_close(*pair, tolerances, share) for pair in zip(expected, actual))


def is_same_tensor(tensor: Tensor, known: Tensor) -> bool:
    """Whether two tensors have equal values, with NaN equal to NaN."""
    kinds = [(each.shape, each.dtype, each.device, each.layout) for each in (tensor, known)]
    if kinds[0] != kinds[1]:
        return False
    if tensor.layout is not torch.strided:
        return tensor is known or torch.equal(tensor.to_dense(), known.to_dense())
    same = tensor == known
    return bool((same | ((tensor != tensor) & (known != known))).all())
