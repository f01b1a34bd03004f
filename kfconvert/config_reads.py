"""Which settings the forward of a model reads from its configuration objects; later changes of others do not matter."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


def configurations(model: nn.Module) -> list[Any]:
    """The distinct objects that ``model`` and its submodules have as ``config``, or that are called so."""
    found = (item for module in model.modules() for item in vars(module).items())
    return list({id(value): value for name, value in found if _is_configuration(name, value)}.values())


def _is_configuration(name: str, value: Any) -> bool:
    if isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    # What generate() reads, and no forward, goes by the same names.
    return name == "config" or ("config" in type(value).__name__.lower() and name != "generation_config")


@contextmanager
def recorded_reads(model: nn.Module) -> Iterator[set[str]]:
    """Within the block, the names of all attributes that are read from a configuration of ``model`` are collected."""
    reads: set[str] = set()
    with ExitStack() as stack:
        for config in configurations(model):
            stack.enter_context(_recorded(config, reads))
        yield reads
    reads |= implied(reads, model)


def implied(reads: Collection[str], model: nn.Module) -> set[str]:
    """The settings of ``model`` that were read with the names ``reads``: all, or some by another name."""
    found: set[str] = set()
    for config in configurations(model):
        if "__dict__" in reads:
            found.update(vars(config))
        # transformers lets some settings go by several names.
        aliases = getattr(config, "attribute_map", None) or {}
        found.update([aliases[name] for name in reads if name in aliases])
    return found


@contextmanager
def without_cache(model: nn.Module) -> Iterator[bool]:
    """Within the block, the setting ``use_cache`` of ``model``, which was on, is off; False if none was."""
    holders = [vars(config) for config in configurations(model) if "use_cache" in vars(config)]
    if not holders or any(holder["use_cache"] is not True for holder in holders):
        yield False
        return
    for holder in holders:
        holder["use_cache"] = False
    try:
        yield True
    finally:
        for holder in holders:
            holder["use_cache"] = True


@contextmanager
def _recorded(config: Any, reads: set[str]) -> Iterator[None]:
    own = type(config)

    def read(self: Any, name: str) -> Any:
        reads.add(name)
        return own.__getattribute__(self, name)

    try:
        config.__class__ = type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})
    except TypeError:  # a class that cannot be swapped: everything in it may have been read
        reads.update(vars(config))
        yield
        return
    try:
        yield
    finally:
        config.__class__ = own
