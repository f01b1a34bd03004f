"""Checks which programs serve the example calls: a site is not applied if its program serves none of them."""

from __future__ import annotations

from ..accuracy import model_outputs
from ..runtime import CudaGraphs, Ledger, Variant
from .captures import Captures
from .preparation import Prepared
from .result import Served
from .stages import Stages
from .steps import programs, replace


def replace_served(
    prepared: Prepared,
    captures: Captures,
    variants: dict[str, list[Variant]],
    stages: Stages,
    graphs: CudaGraphs,
    unfused: bool,
) -> tuple[Ledger, Served]:
    """Replace forwards by the programs. Programs that serve no example call are skipped, and their sites rejected.
    ``graphs`` and ``unfused`` as in ``replace`` and ``programs``."""
    ledger = replace(prepared.model, variants, graphs)
    served = serve(prepared, ledger)
    if _reject_unserved(captures, served):
        ledger = replace(prepared.model, programs(captures, stages, unfused), graphs)
        served = serve(prepared, ledger)
    return ledger, served


def serve(prepared: Prepared, ledger: Ledger) -> Served:
    """Run the example calls with the programs in ``ledger``."""
    calls = [prepared.call, *(call for call, _ in prepared.methods)]
    served, guarded = Served(), ledger.guarded
    unmet = dict.fromkeys(guarded, "no example call reaches it")
    if not guarded:
        return served
    try:
        while unmet:
            for each in guarded.values():
                each.reset_counters()
            for path in guarded.keys() - unmet.keys():
                # Lets calls reach the nested programs.
                guarded[path].is_off = any(not path or each.startswith(f"{path}.") for each in unmet)
            found = []
            for call in calls:
                before = {path: each.hits for path, each in guarded.items()}
                refused = {path: each.misses.total() for path, each in guarded.items()}
                model_outputs(prepared.model, call.args, call.kwargs, call.method)
                hits = {path: each.hits - before[path] for path, each in guarded.items()}
                misses = {path: each.misses.total() - refused[path] for path, each in guarded.items()}
                counts = {"hits": _some(hits), "misses": _some(misses)}
                found.append({"method": call.method, "inputs": call.summary(), **counts})
            served.calls.extend([] if served.calls else found)
            served_now = [path for path in unmet if guarded[path].hits]
            # A program that only missed may still serve calls once an enclosing program is off.
            refusing = [] if served_now else [path for path in unmet if guarded[path].misses]
            if not served_now and not refusing:
                break
            served.unserved.update({path: next(iter(guarded[path].misses)) for path in refusing})
            for path in (*served_now, *refusing):
                del unmet[path]
    finally:
        for each in guarded.values():
            each.reset_counters()
            for variant in each.variants:
                variant.program.clear()  # nested programs use memory only once calls reach them
    served.unserved.update(unmet)
    return served


def _reject_unserved(captures: Captures, served: Served) -> bool:
    """Reject the applied sites of parts that serve no example call; returns whether there are any."""
    found = False
    for captured in captures.every():
        reason = served.unserved.get(captured.path) if captured.path else None
        for site in captured.applied if reason is not None else ():
            site.reject(f"{captured.path} serves no example call: {reason}")
            found = True
    return found


def _some(counts: dict[str, int]) -> dict[str, int]:
    return {path: count for path, count in counts.items() if count}
