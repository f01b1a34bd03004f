"""The names and texts in the code of a function: what it may look up, and what it reads of itself."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

# Functions that look up attributes, and such that look up globals, by names in texts, which may have to be longer than
# one name. Longer texts are messages.
_GLOBALS_BY_NAME = frozenset(("globals", "eval", "exec", "vars", "import_module"))
_BY_NAME = frozenset(("getattr", "hasattr", "attrgetter", "methodcaller")) | _GLOBALS_BY_NAME
_WORD, LONGEST = re.compile(r"[A-Za-z_]\w*"), 80


class Names(NamedTuple):
    """What code looks up: names of globals (``looked_up``) and of ``attributes``; its texts, the ``constants``; which
    of these may be attributes that it asks for ``by_name``, and that need not be there; (global, attribute) of what it
    reads ``of_globals``, which it may expect to fail."""

    looked_up: frozenset[str]
    attributes: frozenset[str]
    constants: frozenset[str]
    by_name: frozenset[str]
    of_globals: frozenset[tuple[str, str]]


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> Names:
    """Of ``code`` and of functions within it."""
    looked_up, attributes, constants = set[str](), set[str](), set[str]()
    of_globals = set[tuple[str, str]]()
    by_pattern, before = False, None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            looked_up.add(instruction.argval)
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(instruction.argval)
        if name in ("LOAD_ATTR", "LOAD_METHOD") and before is not None:
            of_globals.add((before, instruction.argval))
        before = instruction.argval if name == "LOAD_GLOBAL" else None
        by_pattern |= name == "MATCH_CLASS"  # patterns of match name attributes as getattr does
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            looked_up |= inner.looked_up
            attributes |= inner.attributes
            constants |= inner.constants
            of_globals |= inner.of_globals
        constants |= texts_in(constant)
    if by_pattern or _BY_NAME & (looked_up | attributes):
        words = {word for constant in constants if len(constant) <= LONGEST for word in _WORD.findall(constant)}
        attributes |= words
        if _GLOBALS_BY_NAME & (looked_up | attributes):
            looked_up |= words
    by_name = attributes & constants if _BY_NAME & (looked_up | attributes) else set[str]()
    texts = frozenset(looked_up), frozenset(attributes), frozenset(constants), frozenset(by_name)
    return Names(*texts, frozenset(of_globals))


def texts_in(constant: Any) -> set[str]:
    """The texts in a constant, which may be a tuple of some."""
    if isinstance(constant, (tuple, frozenset)):
        return set().union(*map(texts_in, constant))
    return {constant} if isinstance(constant, str) else set()


def reads_of_attributes(code: types.CodeType) -> Iterator[tuple[str, int | None]]:
    """Name of each attribute that ``code`` reads, with the offset of the instruction, None where it is read by
    ``getattr``. What tensors have by the same name counts only as asked of the first argument, or of an attribute."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if not hasattr(Tensor, instruction.argval) or _may_be_module(before, code):
                yield instruction.argval, instruction.offset
        before = instruction
    if {"getattr", "hasattr"} & set(code.co_names):
        yield from ((constant, None) for constant in code.co_consts if isinstance(constant, str))


def _may_be_module(loaded: dis.Instruction | None, code: types.CodeType) -> bool:
    if loaded is None or not loaded.opname.startswith("LOAD_FAST"):
        return loaded is not None and loaded.opname == "LOAD_ATTR"
    names = loaded.argval if isinstance(loaded.argval, tuple) else (loaded.argval,)
    return names[-1:] == code.co_varnames[:1]
