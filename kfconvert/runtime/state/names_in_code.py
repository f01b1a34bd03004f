"""The names in the code of a function: the globals that it looks up, and the attributes that it reads."""

from __future__ import annotations

import dis
import functools
import types


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
