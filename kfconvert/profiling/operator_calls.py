"""How many operators of PyTorch a call runs."""

from collections.abc import Callable
from typing import Any

from .thread_profiler import events_of


def count_operators(call: Callable[[], Any]) -> int | None:
    """Operators such as ``aten::add`` that one ``call`` runs, without those that operators call themselves.

    What a compiler has made of them, and runs as code of its own, is not seen: a call of it counts as none. None where
    this thread is being profiled already.
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
