"""Runs a module and records its execution path through the author's code."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..runtime import is_of_author

# Tensor functions and attributes that return sizes.
_OF_SIZES = frozenset(("shape", "size", "numel", "nelement", "stride", "storage_offset"))
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = tuple(
    f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod", "pow") for side in ("", "r")
)
# Instructions without a result.
_IDLE = frozenset(
    name for name in dis.opname if name.startswith(("JUMP_FORWARD", "JUMP_ABSOLUTE")) or name in ("NOP", "POP_TOP")
)
# The maximum length of a computation's text; sums in a loop would be unbounded.
_LONG = 1000


class Way:
    """Calls a module, and records the author's code in these calls: ``instructions``, and ``questions``, comparisons of
    sizes as texts such as ``n // 2 > 4`` in which ``n`` is any size of a tensor.

    Two calls with the same instructions and questions differ at most in the number of repetitions.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.instructions: set[tuple[CodeType, int]] = set()
        self.questions: set[str] = set()

    def __call__(self, **kwargs: Any) -> Any:
        before = sys.gettrace()
        with _Sizes(self.questions):
            sys.settrace(self._entered)
            try:
                return self._model(**kwargs)
            finally:
                sys.settrace(before)

    def is_within(self, other: Way) -> bool:
        """Whether ``other`` ran all instructions of this one except jumps. A constant that only this one loads may be
        an operator's argument, which no question shows."""
        more = {dis.opname[code.co_code[position]] for code, position in self.instructions - other.instructions}
        return more <= _IDLE and self.questions <= other.questions

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not is_of_author(frame.f_globals.get("__name__")):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._executed

    def _executed(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "opcode":
            self.instructions.add((frame.f_code, frame.f_lasti))
        return self._executed


class _Sizes(TorchFunctionMode):
    """Context manager under which tensor sizes record their comparisons in ``questions``."""

    def __init__(self, questions: set[str]):
        super().__init__()
        self._questions = questions

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if (getattr(function.__self__, "__name__", "") if name == "__get__" else name) not in _OF_SIZES:
            return result
        if isinstance(result, tuple):
            return type(result)(_Size(size, "n", self._questions) for size in result)
        return _Size(result, "n", self._questions) if type(result) is int else result


class _Size(int):
    """An int that records its computation."""

    computed: str
    questions: set[str]

    def __new__(cls, value: int, computed: str, questions: set[str]) -> _Size:
        size = super().__new__(cls, value)
        size.computed, size.questions = computed, questions
        return size

    def __bool__(self) -> bool:
        self.questions.add(f"bool {self.computed}")
        return int(self) != 0

    __hash__ = int.__hash__


def _text(value: Any) -> str:
    return value.computed if isinstance(value, _Size) else repr(value)


def _comparing(name: str) -> Callable[[_Size, Any], Any]:
    own = getattr(int, name)

    def compare(self: _Size, other: Any) -> Any:
        if is_of_author(sys._getframe(1).f_globals.get("__name__")) and isinstance(other, (int, float)):
            self.questions.add(f"{self.computed} {name} {_text(other)}")
        return own(self, other)

    return compare


def _computing(name: str) -> Callable[..., Any]:
    own = getattr(int, name)

    def compute(self: _Size, other: Any) -> Any:
        result = own(self, other)
        if type(result) is not int:
            return result
        return _Size(result, f"({self.computed} {name} {_text(other)})"[:_LONG], self.questions)

    return compute


for _name in _COMPARISONS:
    setattr(_Size, _name, _comparing(_name))
for _name in _ARITHMETIC:
    setattr(_Size, _name, _computing(_name))
