"""Outputs and timings of an optimised model beside those of the original."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .accuracy import (
    ValidationResult,
    check_threshold,
    compare,
    evaluation,
    model_outputs,
    one_line,
    reference_outputs,
    split_inputs,
)
from .inputs import ExampleCall
from .process import alone, one_at_a_time, parametrizations_computed
from .profiling import compare_timings

# For the speed-up of `validate_optimization`, both models together.
SPEEDUP_BUDGET_S = 1.0


@dataclasses.dataclass(frozen=True)
class OptimizationResult(ValidationResult):
    """A `ValidationResult` that unpacks as (accurate, speedup): ``passed``, and how many times faster it is.

    The two models are timed against each other when that is first asked for; until then they are kept.
    """

    _measure: Callable[[], float] = dataclasses.field(kw_only=True, repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        yield self.passed
        yield self.speedup

    @functools.cached_property
    def speedup(self) -> float:
        """Median of the original's time over the optimised model's, each in turn; NaN where the latter fails."""
        return self.__dict__.pop("_measure")()


def validate_optimization(
    original: nn.Module, optimized: nn.Module, inputs: Any, accuracy_threshold: float = 1e-6
) -> OptimizationResult:
    """Compare `optimized` with `original` on `inputs`, both against a float64 run of `original`.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs); on the models' device and in their dtype. Any nesting of tensors may come out.

    Each floating-point output passes when its largest relative error (see `ErrorStats`) is at most
    `accuracy_threshold`, or at most 1.5 x that of the original, or within half a unit of rounding of its
    dtype. Where the original's error is exactly 0, four units of rounding are allowed on top of the
    threshold. Integers and booleans must equal the original's, or differ from the float64 run's in at most 1.5 x
    as many places as the original's do (nearly equal scores may come in another order). Plain Python outputs,
    structure, shapes, dtypes, and the places of NaN and infinities must agree with the original's.

    Both models run in evaluation mode without gradients and from the same random state; their training flags,
    the inputs and the random state are afterwards as before. Errors of the original's own forward are raised;
    one of the optimised forward is reported as a failure.

    Raises:
        ValueError: an `accuracy_threshold` that is NaN, below 0 or no number.

    The result holds the report, and unpacks: ``accurate, speedup = validate_optimization(...)``.
    """
    check_threshold(accuracy_threshold)
    args, kwargs = split_inputs(inputs)
    with one_at_a_time(), parametrizations_computed(), alone(original):
        original_out = model_outputs(original, args, kwargs)
        reference = reference_outputs(original, args, kwargs)
        try:
            optimized_out = model_outputs(optimized, args, kwargs)
        except Exception as error:  # whatever it is, the optimised model is not usable and the caller learns why
            reason = f"the optimised model failed: {one_line(error)}"
            result = ValidationResult(False, reason, reference.description, None, None, None, accuracy_threshold)
        else:
            result = compare(reference, original_out, optimized_out, accuracy_threshold)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    measure = functools.partial(_speedup, original, optimized, ExampleCall(args, kwargs))
    return OptimizationResult(**fields, _measure=measure)


def _speedup(original: nn.Module, optimized: nn.Module, call: ExampleCall) -> float:
    """How many times faster `optimized` is, in evaluation mode without gradients, on copies of the inputs."""
    tensors = (*call.tensors(), *original.parameters())
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    models = {"original": original, "optimized": optimized}
    calls = {name: functools.partial(call.copied(), model) for name, model in models.items()}
    with alone(original), evaluation(original), evaluation(optimized):
        try:
            calls["optimized"]()
        except Exception:  # the report has it as the reason
            return math.nan
        return compare_timings(calls, device, SPEEDUP_BUDGET_S).speedup("optimized").ratio
