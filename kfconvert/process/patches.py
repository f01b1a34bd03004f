"""Temporary replacements of attributes and methods that all threads see, while a thread runs a model for a conversion.

This is the list of what a conversion replaces in the process; other threads get the original behavior:

1. ``__getattribute__`` of the classes of modules and configurations: records what a forward reads
   (``runtime.state.configuration``).
2. The code of ``torch.compiler.is_compiling`` and ``is_exporting``: records who asks (``capture.compiler_questions``).
3. ``GraphModule.recompile`` and the stack traces of proxies: a trace is faster without them (``capture.lean_graphs``).
4. ``_Patcher.patch_method`` of ``torch.fx``: shields calls in other threads from a trace (``process.shield``).
5. ``nn.Module.__call__`` and ``generate`` of transformers: a run of a pipeline records its calls (``pipelines``).

In a distributed run, also the kernels of collectives (``process.collectives``) and the wrapper of calls with
distributed parameters (``capture.local_shards``). Log handlers and warnings are filtered (``process.quiet``). Instances
keep their class, so code that checks it is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NOTHING = object()


@contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context manager that sets each attribute (holder, name, value) to its value."""
    own = []
    try:
        for holder, name, value in places:
            own.append((holder, name, getattr(holder, name)))
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in own:
            setattr(holder, name, value)


@contextmanager
def forward_over(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which the instance ``model`` has the method ``forward``. Other threads see it, too."""
    held = vars(model)
    own = held.get("forward", _NOTHING)
    held["forward"] = forward
    try:
        yield
    finally:
        del held["forward"]
        if own is not _NOTHING:
            held["forward"] = own


@contextmanager
def method_over(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context manager that replaces the method ``name`` of ``owner`` with the result of ``make`` for the original. It
    must behave like the original in other threads, also after the context ends.

    Raises:
        TypeError: the class does not allow assignment of methods, such as a compiled class.
    """
    held = type.__getattribute__(owner, "__dict__")
    over, before = make(type.__getattribute__(owner, name)), held.get(name, _NOTHING)
    try:
        type.__setattr__(owner, name, over)  # bypasses the metaclass
        yield
    finally:
        # A class that refuses the assignment does not have it.
        if held.get(name) is over:
            if before is _NOTHING:
                type.__delattr__(owner, name)
            else:
                type.__setattr__(owner, name, before)
