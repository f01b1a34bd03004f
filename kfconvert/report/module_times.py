"""The sites of a conversion as a tree of the modules that they lie in, with the times that were measured of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A name with more dots is not taken apart further, and a tree with more sites tells only how many are left out: a
# record may be of an unknown hand.
MOST_LEVELS = 16
MOST_SITES = 2000


@dataclass
class ModuleTimes:
    """A module with what was found in it. Times are in microseconds, each site measured by itself, and ``before`` and
    ``after`` are those of all timed sites in the module: with none of them applied, and with those that are."""

    name: str = ""
    sites: list[dict[str, Any]] = field(default_factory=list)
    inner: list[ModuleTimes] = field(default_factory=list)
    found: int = 0
    applied: int = 0
    before: float = 0.0
    after: float = 0.0
    fused: float = 0.0  # of ``before``, what belongs to applied sites


def module_times(sites: list[dict[str, Any]]) -> ModuleTimes:
    """The tree of ``sites``, which are MOST_SITES at most, as ``conversion_stats`` has them.

    A module that holds nothing but one module has no place of its own: the name of the inner one tells it.
    """
    root, places = ModuleTimes(), dict[tuple[str, ...], ModuleTimes]()
    for site in sites[:MOST_SITES]:
        steps = site["module"].split(".", MOST_LEVELS - 1) if site["module"] else []
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
