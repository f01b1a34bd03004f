"""The conversion: trace, match, select, replace, validate, report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .conversion import (
    EFFORTS,
    ConversionConfig,
    ConversionError,
    FilterFn,
    Layouts,
    Loads,
    Prepared,
    Progress,
    Result,
    Selector,
    Stages,
    calls_between_checks,
    check_arguments,
    check_callback,
    check_model,
    check_names,
    check_thread,
    controlled,
    drop_for_memory,
    given_back_on_error,
    hand_over,
    log_decisions,
    match,
    memory,
    prepare,
    programs,
    reject_slower_methods,
    replace,
    replace_served,
    revert,
    shares_of_time,
    takes_options,
    time,
    trace,
    validate,
    with_chosen,
    without_gain,
)
from .process import alone, one_at_a_time, only_new_garbage, parametrizations_computed, same_generators
from .report import Explanation, module_classes
from .runtime import CudaGraphs, OnMiss, can_record

__all__ = ["ConversionConfig", "ConversionError", "ModelConverter", "auto_convert_model"]

_LOG = logging.getLogger(__name__)


class ModelConverter:
    """Converts models. ``conversion_stats`` has the statistics of the last conversion.

    Args:
        config: options of the conversion; defaults if None.
        filter_fn: called as ``filter_fn(module, name)`` for each module of a model, with its dotted path ("" for the
            model itself). Returns whether the computation in the module's forward, without its submodules, may be
            fused. A site that covers calls of several modules needs all of them. The selection replaces
            ``chosen_modules`` in the configuration of the conversion.
        on_miss: called as ``on_miss(reason)`` each time that the converted model, or a part of it, runs its original
            forward (fallback), with the reason that ``kfconvert_info()`` counts; not while a compiler traces it. An
            exception in it is reported as a warning once and does not end the call. Pickles and artifacts drop it.
        options: options of ``ConversionConfig``, see there. They override ``config``.

    Raises:
        ConversionError: an option does not exist, has an invalid value, or names an unknown pattern.
    """

    @takes_options
    def __init__(
        self,
        config: ConversionConfig | None = None,
        *,
        filter_fn: FilterFn | None = None,
        on_miss: OnMiss | None = None,
        **options: Any,
    ):
        if config is not None and not isinstance(config, ConversionConfig):
            raise ConversionError(f"config must be a ConversionConfig, not {config!r}"[:300])
        if filter_fn is not None and not callable(filter_fn):
            raise ConversionError(f"filter_fn must be a function of a module and its name, not {filter_fn!r}"[:300])
        check_callback(on_miss)
        self.config = (config or ConversionConfig()).changed(**options)
        check_names(self.config)
        self.filter_fn, self.on_miss = filter_fn, on_miss
        self.conversion_stats: dict[str, Any] = {}
        self._classes: dict[str, str] = {}

    def convert_model(
        self,
        model: nn.Module,
        input_shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        *,
        example_inputs: Any = None,
        dtype: torch.dtype | None = None,
        inplace: bool = False,
        progress: Progress | None = None,
        tune_for: Sequence[Any] | None = None,
        example_calls: Mapping[str, Any] | None = None,
        profile: bool = False,
    ) -> nn.Module:
        """Returns a converted copy of ``model`` in eval mode: same class, same state dict, fused forward.

        Args:
            input_shape: shape of the single input, batch first; token models receive integers. The batch size, and
                the sequence length of token models, may vary in later calls.
            device: device of the conversion and the model; default: the model's device. "auto" is CUDA if available.
            example_inputs: instead of ``input_shape``: a tensor, a tuple of arguments or a dict of keyword arguments.
            dtype: floating-point dtype for the model and its inputs. By default, the model keeps its dtype, and
                ``example_inputs`` keep theirs, or are cast to the model's dtype if the model does not accept them.
            inplace: convert ``model`` instead of a deep copy.
            progress: called with (stage, done, total); stages "trace", "match", "select", "replace", "validate",
                "memory", "time".
            tune_for: the inputs to optimize for, such as batch sizes 1 and 32, or short and long sequences. Each is a
                shape, example inputs, or ``Weighted(inputs, weight)``. The weighted sum of the times for all of them
                decides what is fused, and how; by default, the time for the example. If there is no other example, the
                first of these is the example.
            example_calls: inputs of other public methods, by name, such as ``{"decode": (latents,)}``; each like
                ``example_inputs``. The modules that these methods run are captured for these calls, and the calls are
                checked and timed like the forward.
            profile: measure the share of each module in the time of the original's forward, and the fused share:
                ``time_shares`` in the statistics, which ``explain`` shows. It takes about a second.

        Raises:
            ConversionError: the model cannot run with these inputs, dtype or device; an argument is invalid; or the
                call is within a ``TorchFunctionMode``, whose effects would stay in the model.
        """
        check_arguments(progress, inplace, profile)
        # A copy created under inference_mode could not be trained.
        with (
            torch.inference_mode(False),
            one_at_a_time(),
            parametrizations_computed(),
            alone(model),
            same_generators(),
            only_new_garbage(),
        ):
            # The job and its graphs become garbage after the return.
            stages = Stages(progress)
            given = input_shape, example_inputs, device, dtype, inplace, tune_for, example_calls
            return self._convert(stages, model, given, profile)

    def _convert(self, stages: Stages, model: nn.Module, given: tuple[Any, ...], profile: bool) -> nn.Module:
        check_thread()
        check_model(model)
        _LOG.info("converting %s; non-default options: %s", type(model).__name__, self.config.unusual() or "nothing")
        config = with_chosen(self.config, model, self.filter_fn)
        prepared = prepare(model, *given)
        with given_back_on_error(prepared.as_given):
            return self._converted(stages, prepared, config, profile)

    def _converted(self, stages: Stages, prepared: Prepared, config: ConversionConfig, profile: bool) -> nn.Module:
        """Returns the ``prepared`` model with its programs."""
        threshold = config.accuracy_threshold if config.validate_accuracy else None
        effort, timed = EFFORTS[config.effort], config.select == "measured"
        try:
            replayed = can_record(prepared.device) and config.cuda_graphs is not False
            captures = controlled(trace(prepared, stages, effort, replayed), config, prepared.model)
            match(captures, stages)
            replayed = replayed and not any(form.region.communicates for form in captures.forms)
            selector = Selector(prepared.device, config.accuracy_threshold, timed, replayed, effort)
            layouts = Layouts(captures, selector, Loads(prepared, captures))
            layouts.select(stages)
            variants = programs(captures, stages, replayed)
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
            taken = memory(prepared, captures, stages, bound)
            wanted = None if config.cuda_graphs == "auto" else config.cuda_graphs
            timings = time(prepared, captures, ledger, wanted, stages, effort.timing, config.new_tokens)
            slower = timings.slower() if timed and timings is not None else None
            reverted = verdict.reverted
            are_slower = timed and timings is not None and reject_slower_methods(captures, timings)
            if slower is not None:
                reverted = revert(captures, f"the converted model is slower as a whole: {slower}")
            shares = shares_of_time(prepared, captures) if profile else None
        finally:
            prepared.own_state.restore()
        if slower is not None or are_slower or without_gain(captures, ledger, timings):
            variants = {} if reverted else programs(captures, stages, unfused=False)
            ledger = replace(prepared.model, variants, graphs)
        self.conversion_stats = hand_over(
            Result(
                model=prepared.model,
                device=prepared.device,
                call=prepared.call,
                config=config,
                captures=captures,
                ledger=ledger,
                seconds=stages.seconds,
                asked=prepared.asked,
                not_written=frozenset(prepared.own_state.written),
                check_weights=calls_between_checks(config.check_weights, prepared.device),
                accuracy=verdict.accuracy,
                timings=timings,
                reverted=reverted,
                memory=taken,
                remembered=selector.remembered.found,
                tuned=prepared.tuned,
                time_shares=shares,
                served=served,
            ),
            self.on_miss,
        )
        log_decisions(self.conversion_stats)
        self._classes = module_classes(prepared.model)
        return prepared.model

    def explain(self) -> Explanation:
        """Returns the last conversion as a printable tree of the model's modules. It shows what was fused in each
        module. For other calls it shows the nearest pattern and the call that prevented it, with file and line.

        Raises:
            ConversionError: no model has been converted yet.
        """
        if not self.conversion_stats:
            raise ConversionError("there is nothing to explain yet: call convert_model first")
        return Explanation(self.conversion_stats, self._classes)


@takes_options
def auto_convert_model(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    *,
    example_inputs: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    inplace: bool = False,
    tune_for: Sequence[Any] | None = None,
    example_calls: Mapping[str, Any] | None = None,
    config: ConversionConfig | None = None,
    filter_fn: FilterFn | None = None,
    on_miss: OnMiss | None = None,
    **options: Any,
) -> nn.Module:
    """Calls ``ModelConverter(config, ...).convert_model(model, ...)``. See :class:`ModelConverter`."""
    converter = ModelConverter(config, filter_fn=filter_fn, on_miss=on_miss, **options)
    return converter.convert_model(
        model,
        input_shape,
        device,
        example_inputs=example_inputs,
        dtype=dtype,
        inplace=inplace,
        tune_for=tune_for,
        example_calls=example_calls,
    )
