"""The number of PyTorch operators that a call runs."""

from collections.abc import Callable
from typing import Any

from .thread_profiler import events_of


def count_operators(call: Callable[[], Any]) -> int | None:
    """Counts the operators such as ``aten::add`` that a ``call`` runs, without nested calls of operators.

    Compiled code counts as no operator. Returns None if this thread is already profiled.
    """
    events = events_of(call, memory=False)
    if events is None:
        return None
    count, within = 0, list[bool]()
    for event in events:
        if event.kind() == "push":
            count += _is_operator(event) and not any(within)
            within.append(_is_operator(event))
        elif event.kind() == "pop":
            within.pop()
    return count


def _is_operator(event: Any) -> bool:
    return "::" in event.name() and " " not in event.name()
