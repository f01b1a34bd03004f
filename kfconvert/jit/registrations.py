"""What a library registers with torch: noted where it is loaded on trial, checked before it is loaded for good.

A registration that torch refuses throws while the library is being loaded, where nothing can catch it: the
process dies. What one process refuses is found by the trial; that this process has a name already is found here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .errors import CompileError

# How the schema of a method of a TorchScript class names its namespace.
_CLASS = re.compile(r"__torch__\.torch\.classes\.(\w+)\.")


@dataclass(frozen=True)
class Registrations:
    """``namespaces``: those for which the library has a TORCH_LIBRARY; ``operators``: those that it defines."""

    namespaces: list[str]
    operators: list[str]

    @classmethod
    def since(cls, before: set[str]) -> Registrations:
        """Those made since ``before``, what ``names`` returned."""
        new = names() - before
        namespaces = _namespaces(new) - _namespaces(before)
        return cls(sorted(filter(_is_taken, namespaces)), sorted(new & _defined()))

    def check(self) -> None:
        """Raises CompileError, one line: this process has a namespace or operator already."""
        for namespace in filter(_is_taken, self.namespaces):
            raise CompileError(
                f"kfconvert: this process has a TORCH_LIBRARY({namespace}) already, and torch allows one: a "
                "changed source needs a new process"
            )
        for operator in _defined().intersection(self.operators):
            raise CompileError(
                f"kfconvert: this process has an operator {operator} already: a changed source needs a new process"
            )


def names() -> set[str]:
    """Of all operators that are defined or have a kernel, and the schemas of all methods of classes."""
    schemas = torch._C._jit_get_custom_class_schemas()  # type: ignore[attr-defined]  # the stubs lack it
    return {*torch._C._dispatch_get_all_op_names(), *map(str, schemas)}


def _defined() -> set[str]:
    """Names of the operators that have a schema, and not only a kernel."""
    dumps = torch._C._dispatch_find_dangling_impls()
    undefined = {dump.partition("\n")[0].removeprefix("name: ") for dump in dumps}
    return set(torch._C._dispatch_get_all_op_names()) - undefined


def _namespaces(names: set[str]) -> set[str]:
    """Those of names of operators and of schemas of methods, as ``names`` returns them."""
    found = {name.partition("::")[0] for name in names if "(" not in name}
    return found.union(*map(_CLASS.findall, names))


def _is_taken(namespace: str) -> bool:
    """Whether this process has a TORCH_LIBRARY of that namespace."""
    try:
        # Given back at once: the registration lives as long as the object.
        torch._C._dispatch_library("DEF", namespace, "")
    except RuntimeError:
        return True
    return False
