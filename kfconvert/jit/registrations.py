"""What a source registers with torch, checked before it is loaded.

A registration that torch refuses throws while the library is being loaded, where nothing can catch it: the
process dies. So the refusals that happen in practice are found in the source text first.
"""

from __future__ import annotations

import re

import torch

from .errors import CompileError

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_MACRO = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL)?\s*\(\s*(\w+)")
_SCHEMA = re.compile(r'\.\s*def\s*\(\s*((?:"(?:[^"\\\n]|\\.)*"\s*)+)')


def without_comments(text: str) -> str:
    return _COMMENT.sub(lambda match: match[1] or " ", text)


def check_registrations(text: str, name: str) -> None:
    """``text``: the source without comments; ``name``: what TORCH_EXTENSION_NAME stands for in it.

    Raises:
        CompileError: the process has a namespace or operator already, or torch cannot read a schema.
    """
    macros = list(_MACRO.finditer(text))
    ends = [macro.start() for macro in macros[1:]] + [len(text)]
    for macro, end in zip(macros, ends):
        kind, namespace = macro.groups()
        namespace = name if namespace == "TORCH_EXTENSION_NAME" else namespace
        if kind is None:
            _check_namespace(namespace)
        if kind != "_IMPL":
            for literals in _SCHEMA.findall(text[macro.end() : end]):
                _check_schema(namespace, "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals)))


def _check_namespace(namespace: str) -> None:
    try:
        # Given back at once: the registration lives as long as the object.
        torch._C._dispatch_library("DEF", namespace, "")
    except RuntimeError:
        raise CompileError(
            f"kfconvert: this process has a TORCH_LIBRARY({namespace}) already, and torch allows one: a "
            "changed source needs a new process"
        ) from None


def _check_schema(namespace: str, schema: str) -> None:
    if "(" not in schema:  # a name alone: torch reads the schema off the C++ function
        return
    try:
        operator = torch._C.parse_schema(schema)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].removesuffix(" here:")
        raise CompileError(f'kfconvert: torch cannot read the schema "{schema}": {reason}') from None
    full = operator.name if "::" in operator.name else f"{namespace}::{operator.name}"
    full += f".{operator.overload_name}" if operator.overload_name else ""
    if full in torch._C._dispatch_get_all_op_names():
        raise CompileError(
            f"kfconvert: this process has an operator {full} already: a changed source needs a new process"
        )
