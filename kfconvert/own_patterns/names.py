"""The names of user functions, ``module:qualname``, as stored in artifacts."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..inputs import ExampleCall, InputSpecError, build
from ..matching import Pattern
from .errors import PatternError
from .pattern import Source
from .registration import made

_FUNCTIONS = ("reference", "replacement", "when")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def described(pattern: Pattern) -> dict[str, Any]:
    """Returns a user's ``pattern`` as JSON for ``rebuilt``. Functions without an importable name (lambdas, nested
    functions) and inputs that JSON cannot represent are None."""
    source: Source = pattern.source
    functions = {what: getattr(source, what) for what in _FUNCTIONS}
    names = {what: function and _name_of(function) for what, function in functions.items()}
    return {
        "name": source.name,
        **names,
        "conditional": source.when is not None,
        "numerics": source.numerics,
        "example": source.example,
    }


def functions_in(own: Mapping[str, Any]) -> list[str]:
    """Returns the names of the functions that ``rebuilt`` imports.

    Raises:
        PatternError: ``own``, from ``described``, lacks a name or the example inputs.
    """
    wanted = _FUNCTIONS if own["conditional"] else _FUNCTIONS[:2]
    for what in wanted:
        if own[what] is None:
            raise PatternError(
                f"the {what} of the pattern {own['name']!r} has no importable name: define it as a function of a module"
            )
    if own["example"] is None:
        raise PatternError(f"the example inputs of the pattern {own['name']!r} cannot be described in JSON")
    return [own[what] for what in wanted]


def rebuilt(own: Mapping[str, Any]) -> Pattern:
    """Rebuilds the pattern from ``described``. Imports the modules of its functions, and runs the reference.

    Raises:
        PatternError: a function does not exist, or is not a pattern.
    """
    name = own["name"]
    found: dict[str, Any] = {what: None for what in _FUNCTIONS}
    found |= {what: _function(name, each) for what, each in zip(_FUNCTIONS, functions_in(own))}
    try:
        example = build(own["example"])
    except InputSpecError as error:
        raise PatternError(f"the example inputs of the pattern {name!r} cannot be created: {error}") from None
    if not isinstance(example, (tuple, dict)):
        raise PatternError(f"the example inputs of the pattern {name!r} are not arguments of a call")
    call = ExampleCall((), example) if isinstance(example, dict) else ExampleCall(example)
    _, pattern = made(Source(name, **found, numerics=own["numerics"], call=call))
    return pattern


def _name_of(function: Callable[..., Any]) -> str | None:
    """The importable name of ``function``; None if there is none."""
    kind: Any = function if hasattr(function, "__qualname__") else type(function)
    module = sys.modules.get(getattr(kind, "__module__", None) or "")
    if kind is not function:  # an object, such as a torch module: its name in the module of its class, if any
        names = [name for name, value in vars(module).items() if value is function] if module else []
        return f"{kind.__module__}:{names[0]}" if names else None
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        return name if _NAME.fullmatch(name) and _looked_up(name) is function else None
    except (AttributeError, ImportError):
        return None


def _function(pattern: str, name: str) -> Any:
    try:
        if not _NAME.fullmatch(name):
            raise ImportError("it is not the name of a function")
        found = _looked_up(name)
    except Exception as error:  # imported user code may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise PatternError(f"{name[:200]} of the pattern {pattern!r} cannot be imported: {reason}") from error
    if not callable(found):
        raise PatternError(f"{name} of the pattern {pattern!r} is not a function")
    return found


def _looked_up(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for step in qualname.split("."):
        found = getattr(found, step)
    return found
