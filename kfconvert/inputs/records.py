"""Output classes with named values, as in transformers: dataclasses that are mappings."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from torch.utils import _pytree as pytree

# A class by its Python module and its name.
ClassName = tuple[str, str]


def class_name(kind: type) -> ClassName:
    return kind.__module__, kind.__qualname__


def is_record(kind: Any) -> bool:
    """Whether ``kind`` is an output class with named values."""
    return isinstance(kind, type) and issubclass(kind, OrderedDict) and dataclasses.is_dataclass(kind)


def record_named(name: Any) -> type | None:
    """Returns the class registered with pytree whose ``class_name``, as a list, is ``name``; None if there is none."""
    if not isinstance(name, list) or not all(isinstance(each, str) for each in name):
        return None
    return next((kind for kind in pytree.SUPPORTED_NODES if is_record(kind) and class_name(kind) == tuple(name)), None)
