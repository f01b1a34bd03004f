"""A library's registrations in torch: recorded in the trial process, and checked before this process loads it.

A registration that torch rejects throws an uncatchable exception while the library is loaded, which ends the process.
The trial detects invalid registrations, and this module detects names that this process already has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .errors import CompileError

# The namespace in the schema of a TorchScript class method.
_CLASS = re.compile(r"__torch__\.torch\.classes\.(\w+)\.")


@dataclass(frozen=True)
class Registrations:
    """A library's registrations. ``namespaces``: its TORCH_LIBRARY namespaces; ``operators``: its operators."""

    namespaces: list[str]
    operators: list[str]

    @classmethod
    def since(cls, before: set[str]) -> Registrations:
        """Returns the registrations made since ``before``, a result of ``names``."""
        new = names() - before
        namespaces = _namespaces(new) - _namespaces(before)
        return cls(sorted(filter(_is_taken, namespaces)), sorted(new & _defined()))

    def check(self) -> None:
        """Raises a one-line CompileError if this process already has a namespace or operator."""
        for namespace in filter(_is_taken, self.namespaces):
            raise CompileError(
                f"kfconvert: this process already has a TORCH_LIBRARY({namespace}), and torch allows one: a "
                "changed source needs a new process"
            )
        for operator in _defined().intersection(self.operators):
            raise CompileError(
                f"kfconvert: this process already has an operator {operator}: a changed source needs a new process"
            )


def names() -> set[str]:
    """Returns the names of all operators with a definition or a kernel, and the schemas of all class methods."""
    schemas = torch._C._jit_get_custom_class_schemas()  # type: ignore[attr-defined]  # the stubs lack it
    return {*torch._C._dispatch_get_all_op_names(), *map(str, schemas)}


def _defined() -> set[str]:
    """The names of operators with a schema, not only a kernel."""
    dumps = torch._C._dispatch_find_dangling_impls()
    undefined = {dump.partition("\n")[0].removeprefix("name: ") for dump in dumps}
    return set(torch._C._dispatch_get_all_op_names()) - undefined


def _namespaces(names: set[str]) -> set[str]:
    """The namespaces in a result of ``names``."""
    found = {name.partition("::")[0] for name in names if "(" not in name}
    return found.union(*map(_CLASS.findall, names))


def _is_taken(namespace: str) -> bool:
    """Whether this process has a TORCH_LIBRARY of that namespace."""
    try:
        # Released immediately, because the registration lives as long as the object.
        torch._C._dispatch_library("DEF", namespace, "")
    except RuntimeError:
        return True
    return False
