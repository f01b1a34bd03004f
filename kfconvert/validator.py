"""Comparison of outputs and timings of an optimized model with the original."""

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
from .process import alone, one_at_a_time
from .profiling import compare_timings

# Seconds for the speed-up of `validate_optimization`, for both models together.
SPEEDUP_BUDGET_S = 1.0


@dataclasses.dataclass(frozen=True)
class OptimizationResult(ValidationResult):
    """A `ValidationResult` that unpacks as (accurate, speedup): ``passed``, and the speed-up over the original.

    The first access to the speed-up times both models; until then the result keeps references to them.
    """

    _measure: Callable[[], float] = dataclasses.field(kw_only=True, repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        yield self.passed
        yield self.speedup

    @functools.cached_property
    def speedup(self) -> float:
        """Returns the median ratio of the original's time to the optimized model's; NaN if the latter fails."""
        return self.__dict__.pop("_measure")()


def validate_optimization(
    original: nn.Module, optimized: nn.Module, inputs: Any, accuracy_threshold: float = 1e-6
) -> OptimizationResult:
    """Compares `optimized` with `original` on `inputs`, both against a float64 run of `original`.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs); on the models' device and in their dtype. Outputs may be nested.

    A floating-point output passes if its largest relative error (see `ErrorStats`) is at most `accuracy_threshold`, or
    at most 1.5 x the original's, or within half a rounding unit of its dtype. If the original's error is exactly 0,
    four rounding units are allowed in addition to the threshold. Integers and booleans must equal the original's, or
    have at most 1.5 x as many differences from the float64 run as the original's (nearly equal scores may be in another
    order). Plain Python outputs, structure, shapes, dtypes, and positions of NaN and infinities must match the
    original's.

    Both models run in eval mode without gradients, with the same random state. Training flags, inputs and the random
    state are restored. Errors of the original's forward propagate; errors of the optimized forward are reported as
    failures.

    Raises:
        ValueError: `accuracy_threshold` is NaN, below 0 or not a number.

    The result has the errors of each output, and unpacks: ``accurate, speedup = validate_optimization(...)``.
    """
    check_threshold(accuracy_threshold)
    args, kwargs = split_inputs(inputs)
    with one_at_a_time(), alone(original):
        original_out = model_outputs(original, args, kwargs)
        reference = reference_outputs(original, args, kwargs)
        try:
            optimized_out = model_outputs(optimized, args, kwargs)
        except Exception as error:  # any error makes the optimized model unusable, and is reported
            reason = f"the optimized model failed: {one_line(error)}"
            result = ValidationResult(False, reason, reference.description, None, None, None, accuracy_threshold)
        else:
            result = compare(reference, original_out, optimized_out, accuracy_threshold)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    measure = functools.partial(_speedup, original, optimized, ExampleCall(args, kwargs))
    return OptimizationResult(**fields, _measure=measure)


def _speedup(original: nn.Module, optimized: nn.Module, call: ExampleCall) -> float:
    """The speed-up of `optimized`, in eval mode without gradients, on copies of the inputs."""
    tensors = (*call.tensors(), *original.parameters())
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    models = {"original": original, "optimized": optimized}
    calls = {name: functools.partial(call.copied(), model) for name, model in models.items()}
    with alone(original), evaluation(original), evaluation(optimized):
        try:
            calls["optimized"]()
        except Exception:  # the reason is in the report
            return math.nan
        return compare_timings(calls, device, SPEEDUP_BUDGET_S).speedup("optimized").ratio
