"""Classes of outputs whose values have names, as transformers has them: mappings that are dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

from torch.utils import _pytree as pytree

# A class by the Python module that has it and its name there.
ClassName = tuple[str, str]


def class_name(kind: type) -> ClassName:
    return kind.__module__, kind.__qualname__


def is_record(kind: Any) -> bool:
    """Whether it is such a class."""
    return isinstance(kind, type) and issubclass(kind, OrderedDict) and dataclasses.is_dataclass(kind)


def record_named(name: Any) -> type | None:
    """The one among the classes that pytree knows whose ``class_name`` is this, as a list; None where there is none."""
    if not isinstance(name, list) or not all(isinstance(each, str) for each in name):
        return None
    return next((kind for kind in pytree.SUPPORTED_NODES if is_record(kind) and class_name(kind) == tuple(name)), None)
