"""A digest of the Python code that ran, also of functions that a model finds in lists and dicts."""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from .authors import is_of_author

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, types.EllipsisType,
)  # fmt: skip
# Larger and deeper containers are tables, such as vocabularies.
_MOST, _DEEPEST = 100, 2


class RanCode:
    """Calls ``function``, and notes the code of model authors that runs, with the plain values of its globals and of
    enclosing functions."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._known = set[types.CodeType]()
        self._texts = set[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if sys.getprofile() is not None:
            raise RuntimeError("a profiler is active, which could not go on afterwards")
        sys.setprofile(self._note)
        try:
            return self._function(*args, **kwargs)
        finally:
            sys.setprofile(None)

    def digest(self) -> str:
        return hashlib.sha256("\n".join(sorted(self._texts)).encode(errors="surrogatepass")).hexdigest()

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._known or not is_of_author(frame.f_globals.get("__name__")):
            return
        self._known.add(code)
        read = {name: frame.f_globals.get(name) for name in code.co_names}
        if code.co_freevars:
            read |= {name: frame.f_locals.get(name) for name in code.co_freevars}
        self._texts.add(f"{code_text(code)} {[(name, plain_text(value)) for name, value in sorted(read.items())]}")


def code_text(code: types.CodeType) -> str:
    """Returns a text that is the same for equal code in every process."""
    constants = [code_text(each) if isinstance(each, types.CodeType) else plain_text(each) for each in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def plain_text(value: Any, depth: int = 0) -> str:
    """Returns a text for a plain value or a small container of plain values, the same in every process; "" for
    others."""
    if isinstance(value, PLAIN):
        return repr(value)
    if not isinstance(value, (list, tuple, dict, set, frozenset)) or len(value) > _MOST or depth > _DEEPEST:
        return ""
    if isinstance(value, dict):
        texts = [f"{plain_text(key)}: {plain_text(each, depth + 1)}" for key, each in dict.items(value)]
    else:
        texts = [plain_text(each, depth + 1) for each in value]
    return f"{type(value).__name__} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
