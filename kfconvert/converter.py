"""The whole job: trace, match, select, replace, validate, report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .accuracy import check_threshold
from .conversion import (
    EFFORTS,
    ConversionError,
    Layouts,
    Loads,
    Progress,
    Result,
    Selector,
    Stages,
    calls_between_checks,
    drop_for_memory,
    hand_over,
    match,
    memory,
    merge_weights,
    prepare,
    programs,
    replace,
    resolve_device,
    revert,
    time,
    trace,
    validate,
)
from .process import one_at_a_time, only_new_garbage
from .report import Explanation, module_classes
from .runtime import MOST_RECORDINGS, can_record

__all__ = ["ConversionError", "ModelConverter", "auto_convert_model"]


class ModelConverter:
    """Converts models; ``conversion_stats`` tells what was done to the last one.

    Args:
        validate_accuracy: compare the outputs with a float64 run of the original; a site that makes them worse than
            allowed is found and dropped.
        accuracy_threshold: largest relative error that always passes. Beyond it the converted error may be at most
            1.5 times the original's own.
        select: "measured" applies a site only where it is faster on this device, and returns the model unconverted
            where the whole is slower; "all" applies every accurate site without timing.
        check_weights: after so many calls the weights behind folded and packed ones are compared with what they were,
            to find writes that leave no trace in a tensor (through ``.data``, NumPy, DLPack or a storage); 0 for never.
            Each time all of them are read. By default 100 on the CPU and 0 on CUDA.
        cuda_graphs: on CUDA, whether calls without gradients are recorded as CUDA graphs, one for each combination of
            the inputs' sizes that comes more than once, and replayed, which costs the host one launch; "auto" does so
            where it is faster for the example.
        max_recordings: how many such recordings there may be of each program, 16 by default.
        static_outputs: hand out the outputs of a replay where the recording wrote them, which saves copying them: they
            hold until the next call with inputs of the same sizes. Each recording has memory of its own then.
        max_extra_memory: how much all programs together may keep of what they derive from weights (folded and packed
            ones), as measured with the example: bytes as an int, or as a float a share of the memory of the weights and
            buffers. Sites that gain least are dropped until that holds. None for no bound.
        effort: "full" or "fast". The latter captures what calls like the example need and nothing for others (further
            forms of the call, blocks on their own), measures for a quarter of the time, and leaves out sites for which
            no time is left. What is remembered from earlier conversions is not timed again in either.
    """

    def __init__(
        self,
        validate_accuracy: bool = True,
        accuracy_threshold: float = 1e-6,
        select: str = "measured",
        check_weights: int | None = None,
        cuda_graphs: bool | str = "auto",
        max_recordings: int = MOST_RECORDINGS,
        static_outputs: bool = False,
        max_extra_memory: float | None = None,
        effort: str = "full",
    ):
        if cuda_graphs not in (True, False, "auto"):
            raise ConversionError(f"cuda_graphs must be True, False or 'auto', not {cuda_graphs!r}")
        if select not in ("measured", "all"):
            raise ConversionError(f"select must be 'measured' or 'all', not {select!r}")
        if effort not in tuple(EFFORTS):
            raise ConversionError(f"effort must be {' or '.join(map(repr, EFFORTS))}, not {effort!r}")
        if check_weights is not None and (type(check_weights) is not int or check_weights < 0):
            raise ConversionError(f"check_weights must be a number of calls, 0 for never, not {check_weights!r}")
        if type(max_recordings) is not int or max_recordings < 1:
            raise ConversionError(f"max_recordings must be a number of recordings, at least 1, not {max_recordings!r}")
        if max_extra_memory is not None and not _is_bound(max_extra_memory):
            raise ConversionError(
                f"max_extra_memory must be bytes as an int or a share as a float, at least 0, not {max_extra_memory!r}"
            )
        try:
            check_threshold(accuracy_threshold)
        except ValueError as error:
            raise ConversionError(str(error)) from None
        self.effort = effort
        self.check_weights, self.max_extra_memory = check_weights, max_extra_memory
        self.cuda_graphs, self.max_recordings, self.static_outputs = cuda_graphs, max_recordings, static_outputs
        self.validate_accuracy = validate_accuracy
        self.accuracy_threshold = accuracy_threshold
        self.select = select
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
    ) -> nn.Module:
        """A converted copy of ``model`` in eval mode: same class, same state dict, fused forward.

        Args:
            input_shape: shape of the single input, batch first; token models receive integers. The batch size, and
                the sequence length of token models, are free afterwards.
            device: where to convert and run; the model's own device by default, "auto" for CUDA where there is one.
            example_inputs: instead of ``input_shape``: a tensor, a tuple of arguments or a dict of keyword arguments.
            dtype: floating-point dtype to bring the model and its inputs to. By default the model keeps its own, and
                gets ``example_inputs`` as they are, or in its own dtype where it does not take them so.
            inplace: convert ``model`` itself instead of a deep copy.
            progress: called with (stage, done, total); stages "trace", "match", "select", "replace", "validate",
                "memory", "time".
            tune_for: the inputs that the model is to be fast for, such as one row and 32, short and long; each is a
                shape or example inputs, or one of these as ``Weighted(inputs, weight)``. What is fused, and how, is
                decided by the weighted sum of the times for all of them. Without it, by the time for the example. Where
                there is no other example, it is the first of these.

        Raises:
            ConversionError: the model cannot run with these inputs, dtype or device.
        """
        # A copy made under inference_mode could not be trained.
        with torch.inference_mode(False), one_at_a_time(), only_new_garbage():
            # The job and its graphs are garbage once this returns.
            return self._convert(Stages(progress), model, input_shape, example_inputs, device, dtype, inplace, tune_for)

    def _convert(
        self,
        stages: Stages,
        model: nn.Module,
        input_shape: Sequence[int] | None,
        example_inputs: Any,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        inplace: bool,
        tune_for: Sequence[Any] | None,
    ) -> nn.Module:
        threshold, effort = self.accuracy_threshold, EFFORTS[self.effort]
        prepared = prepare(model, input_shape, example_inputs, resolve_device(device, model), dtype, inplace, tune_for)
        try:
            captures = trace(prepared, stages, effort)
            match(captures, stages)
            replayed = can_record(prepared.device) and self.cuda_graphs is not False
            selector = Selector(prepared.device, threshold, self.select == "measured", replayed, effort)
            layouts = Layouts(captures, selector, Loads(prepared, captures))
            layouts.select(stages)
            variants = programs(captures, stages)
            verdict = validate(prepared, captures, layouts, threshold if self.validate_accuracy else None, stages)
            bound = self.max_extra_memory
            while bound is not None and not verdict.reverted and drop_for_memory(prepared, captures, bound):
                variants = programs(captures, stages)
                verdict = validate(prepared, captures, layouts, threshold if self.validate_accuracy else None, stages)
            if verdict.reverted:
                variants = {}
            elif verdict.dropped:
                variants = programs(captures, stages)
            else:  # what other times would have led to may pass, and is not to be kept from later conversions
                selector.remembered.save()
            ledger = replace(prepared.model, variants, self.max_recordings, self.static_outputs)
            prepared.moved += merge_weights(prepared.model, variants)
            taken = memory(prepared, captures, stages, bound)
            wanted = None if self.cuda_graphs == "auto" else bool(self.cuda_graphs)
            timings, reverted = time(prepared, captures, ledger, wanted, stages, effort.timing), verdict.reverted
            slower = None if timings is None else timings.slower()
            if self.select == "measured" and slower is not None:
                reverted = revert(captures, f"the converted model is slower as a whole: {slower}")
        finally:
            prepared.own_state.restore()
        self.conversion_stats = hand_over(
            Result(
                prepared.model,
                prepared.device,
                prepared.call,
                captures,
                ledger,
                stages.seconds,
                prepared.asked,
                frozenset(prepared.own_state.written),
                calls_between_checks(self.check_weights, prepared.device),
                verdict.accuracy,
                timings,
                reverted,
                taken,
                selector.remembered.found,
                prepared.tuned,
            )
        )
        self._classes = module_classes(prepared.model)
        return prepared.model

    def explain(self) -> Explanation:
        """The last conversion as a tree of the model's modules: what was fused in each, and for what was not, the
        nearest pattern and the call that stood in the way, with file and line. ``print`` it.

        Raises:
            ConversionError: no model has been converted yet.
        """
        if not self.conversion_stats:
            raise ConversionError("there is nothing to explain yet: call convert_model first")
        return Explanation(self.conversion_stats, self._classes)


def _is_bound(limit: Any) -> bool:
    return type(limit) in (int, float) and 0 <= limit < math.inf


def auto_convert_model(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    *,
    example_inputs: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    validate_accuracy: bool = True,
    accuracy_threshold: float = 1e-6,
    inplace: bool = False,
    check_weights: int | None = None,
    cuda_graphs: bool | str = "auto",
    max_recordings: int = MOST_RECORDINGS,
    static_outputs: bool = False,
    max_extra_memory: float | None = None,
    tune_for: Sequence[Any] | None = None,
    effort: str = "full",
) -> nn.Module:
    """``ModelConverter(...).convert_model(...)`` in one call; see there."""
    converter = ModelConverter(
        validate_accuracy,
        accuracy_threshold,
        check_weights=check_weights,
        cuda_graphs=cuda_graphs,
        max_recordings=max_recordings,
        static_outputs=static_outputs,
        max_extra_memory=max_extra_memory,
        effort=effort,
    )
    return converter.convert_model(
        model,
        input_shape,
        device,
        example_inputs=example_inputs,
        dtype=dtype,
        inplace=inplace,
        tune_for=tune_for,
    )
