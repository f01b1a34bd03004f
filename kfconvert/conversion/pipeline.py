"""A whole conversion: prepare, trace, match, select, replace, validate, time, deliver."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..process import alone, garbage_collected, one_at_a_time, same_generators
from ..runtime import CudaGraphs, OnMiss, can_record
from ..torch_state import uncached_autocast
from .captures import trace
from .checks import check_model, check_thread
from .config import ConversionConfig
from .control import FilterFn, controlled, with_chosen
from .decision_log import log_decisions
from .effort import EFFORTS
from .generated_kernels import GeneratedForm, generate_kernels
from .layouts import Layouts
from .memory_bound import drop_for_memory
from .memory_use import memory
from .preparation import Prepared, Request, prepare
from .result import Result
from .rollback import given_back_on_error
from .selector import Selector
from .serving import replace_served
from .sites import match
from .stages import Progress, Stages
from .statistics import ConversionStats
from .steps import calls_between_checks, hand_over, merge_weights, programs, replace
from .time_shares import shares_of_time
from .timing import reject_slower_methods, time, without_gain
from .validation import revert, validate
from .workloads import Loads

_LOG = logging.getLogger(__name__)


def convert(
    model: nn.Module,
    request: Request,
    config: ConversionConfig,
    filter_fn: FilterFn | None = None,
    on_miss: OnMiss | None = None,
    progress: Progress | None = None,
    profile: bool = False,
) -> tuple[nn.Module, ConversionStats]:
    """Returns the converted model and its statistics. See ``ModelConverter`` for the arguments and errors."""
    check_thread()
    check_model(model)
    _LOG.info("converting %s; non-default options: %s", type(model).__name__, config.unusual() or "nothing")
    # A copy created under inference_mode could not be trained.
    with (
        torch.inference_mode(False),
        one_at_a_time(),
        alone(model),
        same_generators(),
        garbage_collected(),
        uncached_autocast(),
    ):
        stages = Stages(progress)
        config = with_chosen(config, model, filter_fn)
        prepared = prepare(model, request)
        with given_back_on_error(prepared.as_given):
            return prepared.model, _stats_of_converted(stages, prepared, config, on_miss, profile)


def _stats_of_converted(
    stages: Stages, prepared: Prepared, config: ConversionConfig, on_miss: OnMiss | None, profile: bool
) -> ConversionStats:
    """Converts the ``prepared`` model in place."""
    threshold = config.accuracy_threshold if config.validate_accuracy else None
    effort, timed = EFFORTS[config.effort], config.select == "measured"
    try:
        recorded = can_record(prepared.device) and config.cuda_graphs is not False
        captures = controlled(trace(prepared, stages, effort, recorded), config, prepared.model)
        match(captures, stages)
        replayed = recorded and not any(form.region.communicates for form in captures.forms)
        selector = Selector(prepared.device, config.accuracy_threshold, timed, replayed, effort)
        layouts = Layouts(captures, selector, Loads(prepared, captures))
        layouts.select(stages)
        variants = programs(captures, stages, replayed)
        merge_weights(prepared.model, variants)
        verdict = validate(prepared, captures, layouts, threshold, stages)
        bound = config.max_extra_memory
        while bound is not None and not verdict.reverted and drop_for_memory(prepared, captures, bound):
            variants = programs(captures, stages, replayed)
            verdict = validate(prepared, captures, layouts, threshold, stages)
        if verdict.reverted:
            variants = {}
        elif verdict.dropped:
            variants = programs(captures, stages, replayed)
        else:  # other timings may give a valid result, so later conversions may try again
            selector.remembered.save()
        prepared.keep_original()
        graphs = CudaGraphs(type(prepared.model).__name__, config.max_recordings, config.static_outputs)
        ledger, served = replace_served(prepared, captures, variants, stages, graphs, replayed)
        generated: list[GeneratedForm] = []
        if timed and recorded and not verdict.reverted and not any(form.region.autocast for form in captures.forms):
            generated = generate_kernels(captures, ledger, selector, layouts.loads, verdict.judge, stages)
        taken = memory(prepared, captures, stages, bound)
        graphs.enabled = recorded
        timings = time(prepared, captures, ledger, config, stages, effort.timing)
        slower = timings.slower() if timed and timings is not None else None
        are_slower = timed and timings is not None and reject_slower_methods(captures, timings)
        reverted = verdict.reverted
        if slower is not None:
            reverted, generated = revert(captures, f"the converted model is slower as a whole: {slower}"), []
        shares = shares_of_time(prepared, captures) if profile else None
    finally:
        prepared.own_state.restore()
    if slower is not None or are_slower or without_gain(captures, ledger, timings):
        variants = {} if reverted else programs(captures, stages, unfused=False)
        ledger = replace(prepared.model, variants, graphs)
    result = Result(
        model=prepared.model,
        device=prepared.device,
        call=prepared.call,
        config=config,
        captures=captures,
        ledger=ledger,
        seconds=stages.seconds,
        not_written=frozenset(prepared.own_state.written),
        check_weights=calls_between_checks(config.check_weights, prepared.device),
        accuracy=next((form.accuracy for form in generated if form.accuracy), verdict.accuracy),
        timings=timings,
        reverted=reverted,
        memory=taken,
        remembered=selector.remembered.found,
        tuned=prepared.tuned,
        time_shares=shares,
        served=served,
        generated=generated,
    )
    stats = hand_over(result, on_miss)
    log_decisions(stats)
    return stats
