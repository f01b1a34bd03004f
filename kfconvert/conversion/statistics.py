"""conversion_stats: what was found, applied and rejected, how accurate and how fast, as one plain dict."""

from __future__ import annotations

import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ..extension import EXTENSION_LOADED
from ..graph import at
from ..inputs import described
from ..matching import NearMiss
from ..patterns import REGISTRY
from ..version import __version__

if TYPE_CHECKING:
    from .steps import Conversion


def conversion_stats(job: Conversion) -> dict[str, Any]:
    """The statistics of a finished conversion.

    Counts and sites are those of the first call form, or of the outermost parts where the model as a whole could not
    be captured. ``part_sites`` are those of all parts, which also serve calls that the model's own guard refuses.

    Keys: ``<pattern>_found`` and ``<pattern>_replaced`` for every registered pattern, ``total_found``,
    ``total_replaced``, ``speedup_achieved`` (original time over converted time, None where nothing was timed or the
    original is given back), ``sites``, ``near_misses``, ``regions``, ``parts_left_out`` (how many submodules there was
    no time to look at), ``dynamic``, ``accuracy``, ``timings`` (milliseconds), ``seconds`` a stage, ``check_weights``
    (calls, 0 for never), ``asked`` (what the model's code asks of
    tensors, see ``tensor_facts``), ``not_written`` (attributes that the forward sets for others to read, which fused calls leave
    as they are), ``environment``, ``model``, ``inputs``, ``layout``, ``reverted`` and ``nothing_fused`` (None
    or why).
    """
    main = job.outermost()
    sites = [site for captured in main for site in captured.sites]
    inner = [site for captured in job.every_capture() if captured.path for site in captured.sites]
    found = Counter(site.match.pattern.name for site in sites)
    applied = Counter(site.match.pattern.name for site in sites if site.status == "applied")
    counts = {}
    for pattern in REGISTRY:
        counts[f"{pattern.name}_found"] = found[pattern.name]
        counts[f"{pattern.name}_replaced"] = applied[pattern.name]
    timed = job.timings is not None
    return {
        **counts,
        "total_found": found.total(),
        "total_replaced": applied.total(),
        "speedup_achieved": job.timings.speedup("converted").ratio if timed and not job.reverted else None,
        "sites": [site.as_dict() for site in sites],
        "part_sites": [site.as_dict() for site in inner],
        "near_misses": [_near_miss(miss, captured.path) for captured in main for miss in captured.findings.near_misses],
        "regions": job.regions,
        "parts_left_out": job.parts_left_out,
        "dynamic": job.captures[0].region.dynamic() if job.captures else [],
        "accuracy": job.accuracy.as_dict() if job.accuracy else None,
        "timings": job.timings.as_dict() if timed else None,
        "seconds": {stage: round(seconds, 3) for stage, seconds in job.seconds.items()},
        "environment": _environment(job),
        "model": type(job.model).__name__,
        "inputs": job.call.summary(),
        "example": described(job.call.kwargs or job.call.args),
        "asked": sorted(job.asked),
        "check_weights": job.calls_between_checks(),
        "not_written": sorted(job.own_state.written) if applied.total() else [],
        "layout": "channels_last" if any(captured.channels_last for captured in main) else "contiguous",
        "reverted": job.reverted,
        "nothing_fused": None if applied.total() else _why_nothing(job),
    }


def _near_miss(miss: NearMiss, region: str) -> dict[str, str | None]:
    module = ".".join(filter(None, (region, miss.site)))
    return {"pattern": miss.pattern, "module": module, "reason": miss.reason, "location": miss.location}


def _environment(job: Conversion) -> dict[str, Any]:
    dtype = next((p.dtype for p in job.model.parameters() if p.is_floating_point()), None)
    cuda = job.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "kfconvert": __version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(job.device) if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "extension": EXTENSION_LOADED,
    }


def _why_nothing(job: Conversion) -> str:
    if job.reverted:
        return job.reverted
    main = job.outermost()
    if not main:
        region = job.regions[0]
        return f"it could not be captured: {region['reason']}{at(region.get('location'))}"
    sites = [site for captured in main for site in captured.sites]
    if sites:
        reason, count = Counter(site.reason for site in sites).most_common(1)[0]
        return f"{len(sites)} sites were found, none was applied; of {count}: {reason}"
    misses = [_near_miss(miss, captured.path) for captured in main for miss in captured.findings.near_misses]
    if misses:
        nearest = "{pattern} at {module}: {reason}".format(**misses[0] | {"module": misses[0]["module"] or "the root"})
        return f"no site was found; nearest: {nearest}{at(misses[0]['location'])}"
    return "it has no linear, convolution or layer norm call"
