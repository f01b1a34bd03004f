"""conversion_stats: found, applied and rejected sites, accuracy and times, as one plain dict."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch

from ..capture import methods_with_modules
from ..graph import at
from ..inputs import described
from ..json_values import json_ready
from ..matching import NearMiss, UnmatchedActivation
from ..own_patterns import described as described_pattern
from ..patterns import every_pattern
from ..profiling import environment
from ..report import fragment, report_text
from .result import Result


class ConversionStats(dict[str, Any]):
    """A dict of statistics that prints as the report, and that notebooks show as its page. It has counts of the
    patterns that were found. ``stats["attention_replaced"]`` returns 0 for other patterns, which are not listed."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or _is_count(key)

    def __missing__(self, key: str) -> int:
        if _is_count(key):
            return 0
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __str__(self) -> str:
        return report_text(json_ready(self))

    def _repr_html_(self) -> str:
        return fragment(json_ready(self))


def conversion_stats(result: Result) -> ConversionStats:
    """Returns the statistics of a finished conversion.

    Counts and sites belong to the first call form, or to the outermost parts if the model as a whole was not captured.
    ``form_sites`` belong to the further call forms, ``part_sites`` to all parts, which also serve calls that the guard
    of the model rejects.

    Keys: ``<pattern>_found`` and ``<pattern>_replaced`` for every pattern that was found, ``total_found``,
    ``total_replaced``, ``speedup_achieved`` (original time over converted time; None without timing, or if the
    original is returned), ``sites``, ``near_misses``, ``unmatched_activations`` (no pattern matches them),
    ``regions``, ``parts_left_out`` (number of submodules skipped for lack of time), ``served`` (for each example
    call its ``method``, None for the forward, ``inputs``, and the ``hits`` and ``misses`` of programs by path),
    ``methods`` (see ``_methods``), ``dynamic``, ``accuracy``,
    ``timings`` (milliseconds), ``time_shares`` (see ``shares_of_time``; None unless requested),
    ``tuned_for`` (``inputs``, ``weight`` and ``timings`` of each input in ``tune_for``), ``generation`` (see
    ``GenerationTimings.as_dict``; None for models without ``generate``, or if nothing was converted), ``seconds`` per
    stage, ``remembered`` (number of cached candidate timings), ``remembered_graphs`` (number of call forms with cached
    graphs), ``check_weights`` (calls, 0 for never),
    ``cuda_graphs`` (see ``runtime.CudaGraphs.info``), ``generated`` (see ``GeneratedForm.as_dict``),
    ``autocast`` (its dtype, None if it was off),
    ``generates`` (whether calls that ``generate`` makes were captured), ``not_written`` (attributes that the
    forward assigns for other code, and that fused calls do not assign),
    ``memory`` (see ``_memory``), ``environment``, ``own_patterns`` (applied patterns that the user registered, see
    ``own_patterns.described``), ``model``, ``config`` (see ``ConversionConfig``), ``inputs``, ``layout``,
    and three reasons or None: ``reverted`` (why applied sites were rejected), ``nothing_fused``, and
    ``given_back`` (why the model has no programs and is the unchanged original). ``replays_unfused``: whether programs
    without fusions serve calls, because their CUDA graphs are faster.
    """
    main = result.captures.outermost()
    sites = [site for captured in main for site in captured.found]
    inner = [site for captured in result.captures.every() if captured.path for site in captured.found]
    found = Counter(site.match.pattern.name for site in sites)
    applied = Counter(site.match.pattern.name for site in sites if site.status == "applied")
    counts = {}
    for pattern in every_pattern():
        if found[pattern.name]:
            counts[f"{pattern.name}_found"] = found[pattern.name]
            counts[f"{pattern.name}_replaced"] = applied[pattern.name]
    given_back = None if result.ledger.guarded else _why_nothing(result)
    timings = None if result.timings is None else result.timings.example
    generation = None if result.timings is None else result.timings.generation
    stats = {
        **counts,
        "total_found": found.total(),
        "total_replaced": applied.total(),
        "speedup_achieved": timings.speedup("converted").ratio if timings and not given_back else None,
        "sites": [site.as_dict() for site in sites],
        "form_sites": [[site.as_dict() for site in form.sites] for form in result.captures.others],
        "part_sites": [site.as_dict() for site in inner],
        "near_misses": [_located(miss, captured.path) for captured in main for miss in captured.findings.near_misses],
        "unmatched_activations": [
            _located(each, captured.path) for captured in main for each in captured.findings.activations
        ],
        "own_patterns": _own_patterns(result),
        "regions": list(result.captures.regions),
        "parts_left_out": result.captures.left_out,
        "served": [] if result.served is None or result.reverted else result.served.calls,
        "methods": _methods(result),
        "dynamic": result.captures.example.region.dynamic() if result.captures.example else [],
        "accuracy": result.accuracy.as_dict() if result.accuracy else None,
        "timings": timings.as_dict() if timings is not None else None,
        "time_shares": result.time_shares,
        "tuned_for": _tuned(result),
        "generation": generation.as_dict() if generation is not None else None,
        "seconds": {stage: round(seconds, 3) for stage, seconds in result.seconds.items()},
        "remembered": result.remembered,
        "remembered_graphs": result.captures.remembered,
        "environment": _environment(result),
        "model": type(result.model).__name__,
        "config": json_ready(dict(result.config)),
        "autocast": next((_dtype_name(each.region.autocast[1]) for each in main if each.region.autocast), None),
        "inputs": result.call.summary(),
        "generates": any(captured.region.call.form.caches for captured in result.captures.others),
        "example": described(result.call.kwargs or result.call.args),
        "check_weights": result.check_weights,
        "cuda_graphs": result.ledger.graphs.info(),
        "generated": [] if given_back else [form.as_dict() for form in result.generated],
        "memory": _memory(result),
        "not_written": sorted(result.not_written) if applied.total() else [],
        "layout": "channels_last" if any(captured.channels_last for captured in main) else "contiguous",
        "reverted": result.reverted,
        "nothing_fused": None if applied.total() else _why_nothing(result),
        "given_back": given_back,
        "replays_unfused": any(
            not variant.program.fused for guarded in result.ledger.guarded.values() for variant in guarded.variants
        ),
    }
    return ConversionStats(stats)


def _is_count(key: object) -> bool:
    """Whether ``key`` is the found or replaced count of a registered pattern."""
    name, _, what = str(key).rpartition("_")
    return what in ("found", "replaced") and any(pattern.name == name for pattern in every_pattern())


def _own_patterns(result: Result) -> list[dict[str, Any]]:
    applied = [site.match.pattern for captured in result.captures.every() for site in captured.applied]
    own = {pattern.name: pattern for pattern in applied if pattern.source is not None}
    return [described_pattern(pattern) for pattern in own.values()]


def _tuned(result: Result) -> list[dict[str, Any]]:
    timed = {} if result.timings is None else {id(call): timings for call, _, timings in result.timings.tuned}
    return [
        {
            "inputs": call.summary(),
            "weight": weight,
            "timings": timed[id(call)].as_dict() if id(call) in timed else None,
        }
        for call, weight in result.tuned
    ]


def _methods(result: Result) -> list[dict[str, Any]]:
    """Returns the public methods other than ``forward`` that call modules of the model: ``name``, the called
    ``modules``, the ``fused`` modules (parts with applied sites), and ``timings`` if there is an example."""
    applied = {c.path for part in result.captures.parts for c in part.captures if c.applied}
    timed = {} if result.timings is None else {call.method: found for call, found in result.timings.methods}
    known = methods_with_modules(result.model)
    found = []
    for name in dict.fromkeys((*known, *filter(None, timed))):
        modules = known.get(name, [])
        fused = [each for each in modules if any(f"{path}.".startswith(f"{each}.") for path in applied)]
        timings = timed[name].as_dict() if name in timed else None
        found.append({"name": name, "modules": modules, "fused": fused, "timings": timings})
    return found


def _located(found: NearMiss | UnmatchedActivation, region: str) -> dict[str, Any]:
    """Returns the fields, with the path of the module in the model in place of that in the ``region``."""
    fields = dataclasses.asdict(found)
    module = ".".join(filter(None, (region, fields.pop("site"))))
    return {**fields, "module": module}


def _memory(result: Result) -> dict[str, Any] | None:
    """Returns bytes, measured with the example: ``weights`` (parameters and buffers, shared memory counted once),
    ``derived`` (additional memory of the converted model, such as folded and packed weights), ``allowed`` (the limit
    ``max_extra_memory``, or None), ``recordings`` (CUDA graphs) and ``peak``. ``peak``, {"original", "converted"}, is
    the maximum that a launched forward allocates in addition, including its outputs. None if it was not measured, or
    nothing was fused."""
    if result.memory is None:
        return None
    kept = {"derived": 0} if result.reverted else {}
    return {**result.memory, **kept, "recordings": result.ledger.graphs.info()["bytes"]}


def _environment(result: Result) -> dict[str, Any]:
    dtype = next((p.dtype for p in result.model.parameters() if p.is_floating_point()), None)
    return {**environment(result.device), "dtype": _dtype_name(dtype)}


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _why_nothing(result: Result) -> str:
    if result.reverted:
        return result.reverted
    main = result.captures.outermost()
    if not main:
        region = result.captures.regions[0]
        return f"it could not be captured: {region['reason']}{at(region.get('location'))}"
    sites = [site for captured in main for site in captured.found]
    if sites:
        reason, count = Counter(site.reason for site in sites).most_common(1)[0]
        return f"{len(sites)} sites were found, none was applied; {count} of them: {reason}"
    misses = [_located(miss, captured.path) for captured in main for miss in captured.findings.near_misses]
    if misses:
        nearest = "{pattern} at {module}: {reason}".format(**misses[0] | {"module": misses[0]["module"] or "the root"})
        return f"no site was found; nearest: {nearest}{at(misses[0]['location'])}"
    return "none of its calls starts a pattern"
