"""The public methods besides ``forward`` that run modules of a model, such as ``decode`` and ``get_image_features``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

# Classes of these modules are bases of many models, and their methods do not belong to one model.
_BASES = ("torch", "transformers.modeling_utils", "transformers.generation", "diffusers.models.modeling_utils")


def methods_with_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return each public method of the class of ``model`` that calls children of it, with the names of these children.

    It reads the source for calls ``self.child(...)``, in the method and in methods that it calls. Methods without
    available source, ``forward``, and methods that only general base classes have are excluded.
    """
    functions = dict(_functions(type(model)))
    calls = {name: _calls_of_self(function) for name, function in functions.items()}
    children = {name for name, child in model.named_children() if child is not None}
    found = {}
    for name in functions:
        if name.startswith("_") or name == "forward":
            continue
        reached = _reached(name, calls)
        if called := sorted(reached & children):
            found[name] = called
    return found


def _functions(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions that ``kind`` and its bases define; functions of ``kind`` come last."""
    for base in reversed(kind.__mro__):
        if base is object or base.__module__.startswith(_BASES):
            continue
        for name, value in vars(base).items():
            if inspect.isfunction(value):
                yield name, value


def _calls_of_self(function: Callable[..., Any]) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return set()
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    }


def _reached(name: str, calls: dict[str, set[str]]) -> set[str]:
    """The names that the method ``name`` calls, directly or through methods."""
    met: set[str] = set()
    waiting = {name}
    while waiting:
        met |= waiting
        waiting = {called for each in waiting for called in calls.get(each, ())} - met
    return met
