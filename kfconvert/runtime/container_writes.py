"""The names of the containers that code writes to, as far as its instructions tell: caches, rather than settings."""

from __future__ import annotations

import dis
import functools
import types

_WRITING_METHODS = frozenset(
    ("setdefault", "update", "pop", "popitem", "clear", "move_to_end", "__setitem__", "__delitem__", "__ior__")
)
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


@functools.lru_cache(4096)
def containers_written(code: types.CodeType) -> frozenset[str]:
    """The names of globals, variables of closures and attributes, in ``code`` and in functions within it, of which
    items are set or deleted, or methods are called that do so."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    found = set()
    for index, instruction in enumerate(instructions):
        place = None
        if instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            place = _producer(instructions, index, 2)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _WRITING_METHODS:
            place = index - 1
        if place is not None:
            found |= _names_at(instructions, place, set())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= containers_written(constant)
    return frozenset(found)


def _producer(instructions: list[dis.Instruction], index: int, below: int) -> int | None:
    """The instruction that has put there what lies as the ``below``-th value on the stack before the one at ``index``;
    None where that is not in the straight line before it."""
    height = 0  # of the stack before an instruction, seen from that before the one at ``index``
    for place in range(index - 1, -1, -1):
        instruction = instructions[place]
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return None
        height -= dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if height <= -below:
            return place
    return None


def _names_at(instructions: list[dis.Instruction], place: int, seen: set[str]) -> set[str]:
    """The names of what the instruction at ``place`` loads; a local variable goes by those of what it was assigned."""
    instruction = instructions[place]
    if instruction.opname in _NAMED:
        return {instruction.argval}
    if instruction.opname == "COPY":
        copied = _producer(instructions, place, instruction.arg or 1)
        return set() if copied is None else _names_at(instructions, copied, seen)
    if not instruction.opname.startswith("LOAD_FAST") or instruction.argval in seen:
        return set()
    seen.add(instruction.argval)
    assigned = (
        number - 1
        for number, each in enumerate(instructions)
        if each.opname == "STORE_FAST" and each.argval == instruction.argval and number
    )
    return set().union(*(_names_at(instructions, each, seen) for each in assigned))
