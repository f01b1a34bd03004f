"""What code does with the containers that it names, as far as its instructions tell: whether it keeps results in them,
looks for single items, or goes through all that is there."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

_WRITING = frozenset(
    ("setdefault", "update", "pop", "popitem", "clear", "move_to_end", "__setitem__", "__delitem__", "__ior__")
)
_LOOKING_UP = frozenset(("get", "pop", "setdefault", "__getitem__", "__contains__"))
_METHOD = ("LOAD_ATTR", "LOAD_METHOD")
_NAMED = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_SUPER_ATTR", *_METHOD)


class ContainerUses(NamedTuple):
    """The names of globals, arguments, variables of closures and attributes: those to which items are ``written`` by
    keys that are found out, as results are; those in which items are ``looked_up`` by keys; and those that are used
    otherwise, and so as a ``whole``."""

    written: frozenset[str]
    looked_up: frozenset[str]
    whole: frozenset[str]


@functools.lru_cache(4096)
def container_uses(code: types.CodeType) -> ContainerUses:
    """Of ``code`` and of functions within it."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    written, looked_up, places = set[str](), set[str](), set[int | None]()
    for index, instruction in enumerate(instructions):
        if instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            place = _producer(instructions, index, 2)
            fixed = instructions[index - 1].opname == "LOAD_CONST"
            written |= set() if fixed else _names_at(instructions, place, set())
        elif instruction.opname == "BINARY_SUBSCR":
            place = _producer(instructions, index, 2)
            looked_up |= _names_at(instructions, place, set())
        elif instruction.opname == "CONTAINS_OP":
            place = _producer(instructions, index, 1)
            looked_up |= _names_at(instructions, place, set())
        elif instruction.opname in _METHOD and instruction.argval in _WRITING | _LOOKING_UP:
            place = index - 1
            names = _names_at(instructions, place, set())
            fixed = instructions[index + 1].opname == "LOAD_CONST"  # the first argument
            written |= names if instruction.argval in _WRITING and not fixed else set()
            looked_up |= names if instruction.argval in _LOOKING_UP else set()
        else:
            continue
        places.add(place)
    others = (each for index, each in enumerate(instructions) if index not in places)
    whole = {each.argval for each in others if each.opname in _NAMED or each.opname.startswith("LOAD_FAST")}
    whole = {name for names in whole for name in (names if isinstance(names, tuple) else (names,))}
    found = [container_uses(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    own = ContainerUses(frozenset(written), frozenset(looked_up), frozenset(whole))
    return ContainerUses(*(frozenset().union(*names) for names in zip(own, *found)))


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
            while instructions[place + 1].opname == "LOAD_ATTR":  # of what was loaded, in whose place it puts that
                place += 1
            return place
    return None


def _names_at(instructions: list[dis.Instruction], place: int | None, seen: set[str]) -> set[str]:
    """The names of what the instruction at ``place`` loads; a local variable goes by those of what it was assigned."""
    if place is None:
        return set()
    instruction = instructions[place]
    if instruction.opname in _NAMED:
        return {instruction.argval}
    if instruction.opname == "COPY":
        return _names_at(instructions, _producer(instructions, place, instruction.arg or 1), seen)
    if not instruction.opname.startswith("LOAD_FAST") or instruction.argval in seen:
        return set()
    seen.add(instruction.argval)
    assigned = [
        number - 1
        for number, each in enumerate(instructions)
        if each.opname == "STORE_FAST" and each.argval == instruction.argval and number
    ]
    own = {instruction.argval} if isinstance(instruction.argval, str) and not assigned else set()
    return own.union(*(_names_at(instructions, each, seen) for each in assigned))
