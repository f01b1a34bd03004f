"""The sites of a conversion and their measured times as a tree of modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleTimes:
    """A module with its sites. Times are in microseconds, and each site is measured alone. ``before`` and ``after`` are
    the total times of all timed sites without fusion and with the applied fusions."""

    name: str = ""
    sites: list[dict[str, Any]] = field(default_factory=list)
    inner: list[ModuleTimes] = field(default_factory=list)
    found: int = 0
    applied: int = 0
    before: float = 0.0
    after: float = 0.0
    fused: float = 0.0  # share of ``before`` in applied sites


def module_times(sites: list[dict[str, Any]]) -> ModuleTimes:
    """Returns the tree of ``sites`` of ``conversion_stats``. Modules that contain only one other are merged with it."""
    root, places = ModuleTimes(), dict[tuple[str, ...], ModuleTimes]()
    for site in sites:
        steps = site["module"].split(".") if site["module"] else []
        way = [root]
        for depth, name in enumerate(steps, 1):
            key = tuple(steps[:depth])
            if key not in places:
                places[key] = ModuleTimes(name)
                way[-1].inner.append(places[key])
            way.append(places[key])
        way[-1].sites.append(site)
        for module in way:
            _count(module, site)
    root.inner = [_shortened(module) for module in root.inner]
    return root


def _count(module: ModuleTimes, site: dict[str, Any]) -> None:
    is_applied = site["status"] == "applied"
    module.found += 1
    module.applied += is_applied
    before, after = site.get("original_us"), site.get("fused_us")
    if before is None or after is None or before < 0 or after < 0:
        return
    module.before += before
    module.after += after if is_applied else before
    module.fused += before if is_applied else 0.0


def _shortened(module: ModuleTimes) -> ModuleTimes:
    while not module.sites and len(module.inner) == 1:
        (inner,) = module.inner
        inner.name = f"{module.name}.{inner.name}"
        module = inner
    module.inner = [_shortened(inner) for inner in module.inner]
    return module
