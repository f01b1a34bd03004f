"""Conversion by a record: repeats the decisions of an earlier conversion, without timing or validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn

from ..capture import Part, capture, capture_form, groups
from ..conversion import (
    EFFORTS,
    Captures,
    ConversionConfig,
    Decision,
    OwnState,
    Result,
    Stages,
    calls_between_checks,
    captured_steps,
    controlled,
    gathered,
    generate_again,
    hand_over,
    log_decisions,
    match,
    merge_weights,
    note_layouts,
    programs,
    replace,
)
from ..inputs import ExampleCall, build, call_of
from ..process import one_at_a_time, same_generators
from ..region import CaptureError
from ..runtime import MOST_RECORDINGS, CudaGraphs, OnMiss, can_record, uninstall
from ..torch_state import without_autocast
from .graphs import Graphs

# Results of measurements; a replayed model has the numbers of the conversion that measured them.
_MEASURED = (
    "accuracy", "memory", "timings", "time_shares", "tuned_for", "generation", "config", "speedup_achieved", "inputs",
    "example", "generated", "parts_left_out", "served", "methods", "not_written",
)  # fmt: skip


def replay(
    model: nn.Module,
    device: torch.device,
    calls: list[Any],
    parts: list[dict[str, Any]],
    statistics: dict[str, Any],
    on_miss: OnMiss | None = None,
    graphs: dict[str, Any] | None = None,
) -> nn.Module:
    """Returns ``model``, converted in place with the decisions of ``statistics``, an earlier ``conversion_stats``.

    Args:
        calls: the arguments of each captured call form, the main form first, in the format of ``inputs.described``.
        parts: the separately captured submodules: {"modules": paths, "call": arguments, "free": dimensions of sizes}.
        on_miss: as in ``ModelConverter``.
        graphs: the content of ``graphs.json``, whose graphs need no trace; None if there is none.
    """
    stages, config, recorded = Stages(), config_of(statistics), statistics.get("cuda_graphs") or {}
    most, static_outputs = recorded.get("max_recordings", MOST_RECORDINGS), recorded.get("static_outputs", False)
    with one_at_a_time(), same_generators(), _autocast(statistics, device):
        uninstall(model)
        model = model.to(device).eval()
        replayed = can_record(device) and config.cuda_graphs is not False
        known = Graphs(model, device, graphs)
        whole = known.are_all(bool(statistics.get("generates")))
        # If the model cannot run, there is no state to restore.
        example = calls[0] if calls else statistics.get("example")
        restore = (lambda: None) if whole else _settled(model, device, example)
        found = _captures(model, device, calls, parts, statistics, restore, stages, replayed, known)
        restore()  # removes state of the traces, which no guard should check
        captures = controlled(found, config, model)
        match(captures, stages)
        _decide(captures, statistics)
        cuda_graphs = CudaGraphs(type(model).__name__, most, static_outputs)
        cuda_graphs.enabled = can_record(device) and bool(recorded.get("enabled"))
        unfused = cuda_graphs.enabled and statistics.get("replays_unfused", True)
        variants = programs(captures, stages, unfused)
        ledger = replace(model, variants, cuda_graphs)
        merge_weights(model, variants)
        if cuda_graphs.enabled:
            generate_again(captures, ledger, _generated(statistics, device))
        restore()
    result = Result(
        model=model,
        device=device,
        call=ExampleCall(),
        config=config,
        captures=captures,
        ledger=ledger,
        seconds=stages.seconds,
        not_written=frozenset(),
        check_weights=calls_between_checks(statistics.get("check_weights"), device),
    )
    hand_over(result, on_miss)
    ledger.stats |= {key: statistics.get(key) for key in _MEASURED}
    log_decisions(ledger.stats)
    return model


def _autocast(statistics: dict[str, Any], device: torch.device) -> AbstractContextManager[Any]:
    """Context manager for the autocast of the conversion."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(statistics.get("autocast") or "")
    return without_autocast() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


def _generated(statistics: dict[str, Any], device: torch.device) -> list[tuple[str, list[Any]]]:
    """Returns the kernels, "all" or "rest", and flat inputs of each compiled form that the conversion kept."""
    described = [entry for entry in statistics.get("generated") or [] if entry["leaves"] is not None]
    return [(entry["kernels"], list(build(entry["leaves"], device))) for entry in described]


def config_of(statistics: dict[str, Any]) -> ConversionConfig:
    return ConversionConfig(**statistics.get("config") or {})


def _settled(model: nn.Module, device: torch.device, example: Any) -> Callable[[], None]:
    """Returns a function that restores the state of ``model`` after its first call. As in a conversion, the first call
    uses real tensors: otherwise a trace would store its tensors without data, for example in a global table.

    Args:
        example: the model's inputs in the format of ``inputs.described``; None if they are not recorded.
    """
    own_state = OwnState(model)
    if example is not None:
        call = call_of(build(example, device))
        with suppress(Exception), torch.no_grad():  # a changed model may not accept them
            model(*call.args, **call.kwargs)
    own_state.settled()
    return own_state.restore


def _captures(
    model: nn.Module,
    device: torch.device,
    calls: list[Any],
    parts: list[dict[str, Any]],
    statistics: dict[str, Any],
    restore: Callable[[], None],
    stages: Stages,
    replayed: bool,
    known: Graphs,
) -> Captures:
    """Returns the recorded call forms and parts; ``known`` has the graphs of some of them."""
    forms, found, again = list[Any](), list[Any](), list[Part]()
    with stages.stage("trace", len(calls) + len(parts)) as advance:
        for number, spec in enumerate(calls):
            stored = known.calls[number] if known.calls else None
            forms.append(ExampleCall(kwargs=build(spec, device) if stored is None else stored[0]))
            if stored is None:
                found.append(capture_form(model, forms[-1]))
            else:
                found.append(stored[1])
            advance()
        if statistics.get("generates"):
            steps: Any = [(ExampleCall(kwargs=arguments), captured) for arguments, captured in known.generation or ()]
            if known.generation is None:
                fewest = not EFFORTS[config_of(statistics).effort].other_calls
                steps = captured_steps(model, forms[0], found[0], restore, replayed, fewest)
            for call, captured in steps:
                forms.append(call)
                found.append(captured)
        for number, recorded in enumerate(parts):
            again += _part(model, recorded, device, known.parts[number] if known.parts else None)
            advance()
        if not known.parts:
            example = statistics.get("example")
            note_layouts(model, again, forms[:1] or ([] if example is None else [call_of(build(example, device))]))
    return gathered(model, forms, found, again)


def _part(model: nn.Module, recorded: dict[str, Any], device: torch.device, stored: Any) -> list[Part]:
    """Returns the modules of a part, grouped by structure; several groups only if the record is of another model.
    ``stored``: its arguments and capture, None if it must be traced."""
    modules = {model.get_submodule(path): path for path in recorded["modules"]}
    free = {name: [tuple(place) for place in dimensions] for name, dimensions in recorded["free"].items()}
    parts = []
    for first, *others in groups(modules, lambda module: None):
        if stored is None or stored[1].module is not first:
            call = ExampleCall(kwargs=build(recorded["call"], device))
            try:
                captured = capture(first, modules[first], call, [free])
            except CaptureError:  # the model may have been cast after its conversion
                captured = capture(first, modules[first], _in_dtype_of(first, call), [free])
        else:
            captured = stored[1]
        parts.append(Part([captured, *(captured.alike(modules[module], module) for module in others)]))
    return parts


def _in_dtype_of(module: nn.Module, call: ExampleCall) -> ExampleCall:
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    return call.map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x)


def _decide(captures: Captures, statistics: dict[str, Any]) -> None:
    """Apply and reject the sites by the recorded decisions."""
    decisions = defaultdict(list)
    # If the model itself was captured, its sites are in no part.
    listed = [site for site in statistics.get("sites", []) if not site.get("region")]
    for number, sites in enumerate([listed, *statistics.get("form_sites", [])]):
        for decided in sites:
            decisions[number, "", decided["pattern"], decided["module"]].append(decided)
    for decided in statistics.get("part_sites", []):
        decisions[0, decided.get("region", ""), decided["pattern"], decided["module"]].append(decided)
    numbers = {id(form): number for number, form in enumerate(captures.others, 1)}
    for captured in captures.every():
        captured.channels_last = statistics.get("layout") == "channels_last"
        number = numbers.get(id(captured), 0)
        for site in captured.sites:
            # One module may contain several sites: both lists have the order of the graph.
            recorded = decisions[number, site.region, site.match.pattern.name, site.module_path]
            _decision(recorded.pop(0) if recorded else None).apply_to(site)
            module: Any = site.replacement.module
            if hasattr(module, "channels_last"):
                module.channels_last = captured.channels_last


def _decision(recorded: dict[str, Any] | None) -> Decision:
    if recorded is None:
        return Decision(None, "not found when the model was first converted")
    applied = recorded["status"] == "applied"
    strategy, reason = (recorded["strategy"], None) if applied else (None, recorded["reason"])
    return Decision(strategy, reason, recorded["original_us"], recorded["fused_us"])
