"""The names in the code of a function: the globals that it looks up, and the attributes that it reads."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

from torch import Tensor

_BY_TEXT = frozenset(("getattr", "hasattr"))


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the globals that ``code`` and its nested functions look up, and these with the names of
    attributes."""
    nested = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    instructions = dis.get_instructions(code)
    looked_up = frozenset(each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return (
        looked_up.union(*(names for names, _ in nested)),
        frozenset(code.co_names).union(*(names for _, names in nested)),
    )


def reads_of_attributes(code: types.CodeType) -> Iterator[tuple[str, int | None]]:
    """The name of each attribute that ``code`` reads, with the offset of the instruction, or None for ``getattr``.
    Names of tensor attributes count only for the first argument, or for an attribute."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not hasattr(Tensor, instruction.argval) or _may_be_module(before, code):
                yield instruction.argval, instruction.offset
        before = instruction
    if _BY_TEXT & set(code.co_names):
        yield from ((constant, None) for constant in code.co_consts if isinstance(constant, str))


def _may_be_module(loaded: dis.Instruction | None, code: types.CodeType) -> bool:
    if loaded is None or not loaded.opname.startswith("LOAD_FAST"):
        return loaded is not None and loaded.opname == "LOAD_ATTR"
    names = loaded.argval if isinstance(loaded.argval, tuple) else (loaded.argval,)
    return names[-1:] == code.co_varnames[:1]
