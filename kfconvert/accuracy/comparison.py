"""Accuracy of an optimized model against a float64 run of the original.

Two correct float32 (or float16) implementations of a formula differ, so the optimized model is not only compared with
the original. Both are compared with the same computation in float64, and the optimized model must be about as close to
it as the original.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..json_values import json_ready
from .float64_run import Reference
from .outputs import Outputs

# Maximum ratio of the optimized model's error to the original's. Another order of summation changes the largest error
# of a large output by some tens of percent, and a wrong formula by orders of magnitude.
ERROR_RATIO = 1.5
# If the original's error is 0, an error of this number of rounding units is allowed in addition to the threshold.
ULPS_WITHOUT_ERROR = 4
# If a value of the original differs from the float64 run by more than this share of the output's scale, that run took
# another path through the model. For example, PyTorch's encoders replace padding with zeros only in some dtypes.
_FAR = {torch.float16: 0.25, torch.bfloat16: 0.5}
# Maximum number of reported outputs. Of more outputs, the least accurate are reported.
MOST_OUTPUTS = 64


@dataclasses.dataclass(frozen=True)
class ErrorStats:
    """The errors of a floating-point output against its reference.

    Absolute errors are |output - reference| in the output's unit. Relative errors are divided by `scale` =
    max|reference| of that output (0/0 = 0). `leaf` is the output's path, such as ".last_hidden_state".
    """

    leaf: str
    scale: float
    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """The result of comparing an optimized model with its original.

    `passed` is None if nothing could be compared: no value of the original's floating-point outputs is finite, or
    there are no outputs. `original_error` and `optimized_error` are for the output with the largest relative error;
    None without a measurement (other structure, no floating-point output). `ratio` is the optimized error divided by
    the original's; None if the original's is 0. `reason` is one line, None if `passed`. `differing` counts integers
    and booleans that passed although they differ from the original's. `outputs` has both errors of each
    floating-point output, at most MOST_OUTPUTS.
    """

    passed: bool | None
    reason: str | None
    reference: str
    original_error: ErrorStats | None
    optimized_error: ErrorStats | None
    ratio: float | None
    accuracy_threshold: float
    differing: int = 0
    outputs: tuple[tuple[ErrorStats, ErrorStats], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON; a number that is not finite becomes None."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(ValidationResult)}
        outputs = [{"original_error": original, "optimized_error": optimized} for original, optimized in self.outputs]
        return json_ready({**fields, "outputs": outputs})

    def summary(self) -> str:
        if not self.passed:
            return f"{'' if self.passed is None else 'not accurate: '}{self.reason}"
        if self.optimized_error is None or self.original_error is None:
            return "accurate: all outputs are equal" if not self.differing else f"accurate: {self.reference}"
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.2f}"
        return (
            f"accurate: error {self.optimized_error.max_rel:.1e} of the output's scale "
            f"(original {self.original_error.max_rel:.1e}{ratio}) against the {self.reference}"
        )


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of a tensor, a tuple or list of arguments, a mapping of keywords, or (args, kwargs)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        if len(inputs) == 2 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], Mapping):
            return tuple(inputs[0]), dict(inputs[1])
        return tuple(inputs), {}
    return (inputs,), {}


def compare(
    reference: Reference, original_out: Any, optimized_out: Any, accuracy_threshold: float = 1e-6
) -> ValidationResult:
    """Compares `optimized_out` by the rules of `validate_optimization`. A reference can be used for many candidates."""
    return compare_all([(reference, original_out, optimized_out)], accuracy_threshold)


def compare_all(runs: Sequence[tuple[Reference, Any, Any]], accuracy_threshold: float = 1e-6) -> ValidationResult:
    """Compares the outputs for several inputs together.

    runs: for each input the reference, the original's and the optimized model's outputs. The rules of
    `validate_optimization` apply to the largest error of each output over all inputs, because the largest error of few
    output values is random.
    """
    truths = [Outputs(reference.outputs) for reference, _, _ in runs]
    originals, optimized = ([Outputs(outputs) for outputs in side] for side in list(zip(*runs))[1:])
    description = runs[0][0].description
    reason = next(filter(None, map(Outputs.difference, originals, optimized)), None)
    names = list(originals[0].leaves) if reason is None else []
    if reason is None and any(outputs.leaves.keys() != set(names) for outputs in originals):
        reason = "the structure of the original's outputs depends on the input"
    notes, errors, differing, unmeasured = [description], [], 0, []
    for name in names:
        stored: list[tuple[Any, Any, Any]] = [
            (truth.leaves.get(name), ours.leaves.get(name), theirs.leaves.get(name))
            for truth, ours, theirs in zip(truths, originals, optimized)
        ]
        problem = next(filter(None, (_stored_otherwise(ours, theirs) for _, ours, theirs in stored)), None)
        triples: list[tuple[Any, Any, Any]] = [tuple(map(_dense, triple)) for triple in stored]
        problem = problem or next(filter(None, (_unequal(ours, theirs) for _, ours, theirs in triples)), None)
        ours = triples[0][1]
        if problem is None and isinstance(ours, Tensor) and not _inexact(ours):
            problem, remark, count = _judge_exact(triples)
            notes += [f"output{name} {remark}"] if remark else []
            differing += count
        elif problem is None and isinstance(ours, Tensor):
            measured = [_measure(name, *triple) for triple in triples]
            own, new = _worst([m[0] for m in measured]), _worst([m[1] for m in measured])
            errors.append((own, new))
            if all(values.numel() > 0 and not values.isfinite().any() for _, values, _ in triples):
                unmeasured.append(name)
                notes.append(f"output{name} is entirely NaN or infinite: it was not compared")
            notes += dict.fromkeys(f"output{name} {note}" for *_, note in measured if note)
            allowed = _allowed_error(own, ours.dtype, accuracy_threshold)
            if own.scale == 0 and own.max_abs > 0:  # relative errors are undefined
                allowed = max(ERROR_RATIO * own.max_abs, torch.finfo(ours.dtype).eps)
                if not new.max_abs <= allowed:
                    problem = (
                        f"has error {new.max_abs:.1e} where the {description} is 0; the original has "
                        f"{own.max_abs:.1e}, allowed is {allowed:.1e}"
                    )
            elif not new.max_rel <= allowed:
                problem = (
                    f"has error {new.max_rel:.1e} of its scale against the {description}; "
                    f"the original has {own.max_rel:.1e}, allowed is {allowed:.1e}"
                )
        if problem is not None and reason is None:
            reason = f"output{name} {problem}"

    passed: bool | None = reason is None
    if passed and not names:
        passed, reason = None, "the outputs have nothing that can be compared"
    elif passed and unmeasured and len(unmeasured) == len(errors):
        passed, reason = None, "nothing could be compared: all values of the outputs are NaN or infinite"
    elif errors and all(stats.scale == 0 for stats, _ in errors):
        notes.append("all outputs are 0, so previous layers were not checked")
    original, converted = (
        (max(stats, key=lambda one: one.max_rel) for stats in zip(*errors)) if errors else (None, None)
    )
    return ValidationResult(
        passed=passed,
        reason=reason,
        reference="; ".join(notes),
        original_error=original,
        optimized_error=converted,
        ratio=converted.max_rel / original.max_rel if converted and original and original.max_rel > 0 else None,
        accuracy_threshold=accuracy_threshold,
        differing=differing,
        outputs=tuple(_least_accurate(errors)),
    )


def _least_accurate(errors: list[tuple[ErrorStats, ErrorStats]]) -> list[tuple[ErrorStats, ErrorStats]]:
    """At most MOST_OUTPUTS of the ``errors``: the largest ones of the optimized model, in output order."""
    order = sorted(range(len(errors)), key=lambda place: -errors[place][1].max_rel)
    return [errors[place] for place in sorted(order[:MOST_OUTPUTS])]


def _stored_otherwise(ours: Any, theirs: Any) -> str | None:
    """The difference in device or layout (sparse, nested) of two tensors, or None."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return None
    if ours.device != theirs.device:
        return f"is on {theirs.device}, the original's is on {ours.device}"
    if ours.is_nested != theirs.is_nested:
        return f"is {'' if theirs.is_nested else 'not '}nested, unlike the original's"
    return None if ours.layout is theirs.layout else f"has the layout {theirs.layout}, the original's {ours.layout}"


def _dense(value: Any) -> Any:
    """A comparable dense tensor: all elements of a nested tensor in one dimension, and zeros for the meta device."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    if value.is_nested:
        return torch.cat([part.flatten() for part in value.unbind()])
    return value if value.layout is torch.strided else value.to_dense()


def _unequal(ours: Any, theirs: Any) -> str | None:
    """The difference beyond rounding, or None: type, shape, dtype, exact values, positions of NaN and infinity."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        same = type(ours) is type(theirs) and ours == theirs
        return None if same else f"is {theirs!r:.40}, the original's is {ours!r:.40}"
    if ours.shape != theirs.shape:
        return f"has shape {tuple(theirs.shape)}, the original's is {tuple(ours.shape)}"
    if ours.dtype != theirs.dtype:
        return f"has dtype {theirs.dtype}, the original's is {ours.dtype}"
    if not _inexact(ours):
        return None  # see _judge_exact
    ours, theirs = _float64(ours), _float64(theirs)
    finite = ours.isfinite()
    wrong = int((finite != theirs.isfinite()).sum())
    if wrong == 0 and not finite.all():
        # NaN must match NaN, and infinities must match with their sign.
        wrong = int((ours[~finite].nan_to_num(nan=0.0) != theirs[~finite].nan_to_num(nan=0.0)).sum())
    return f"has NaN or infinity unlike the original's in {wrong} values" if wrong else None


def _judge_exact(triples: Sequence[tuple[Any, Tensor, Tensor]]) -> tuple[str | None, str | None, int]:
    """Compares integers or booleans. Returns (reason for a failure, note if they pass with differences, number of
    differences).

    triples: their values in the float64 run, the original and the optimized model, for each input. Rounding decides
    some values (the order of nearly equal scores, the class of a tie). The optimized model may therefore have
    ERROR_RATIO times as many differences from the float64 run as the original.
    """
    differing = sum(int((ours != theirs).sum()) for _, ours, theirs in triples)
    if differing == 0:
        return None, None, 0
    total = sum(ours.numel() for _, ours, _ in triples)
    text = f"differs from the original's in {differing} of {total} exact values"
    if not all(isinstance(truth, Tensor) and truth.shape == ours.shape for truth, ours, _ in triples):
        return text, None, 0
    own = sum(int((ours != truth).sum()) for truth, ours, _ in triples)
    new = sum(int((theirs != truth).sum()) for truth, _, theirs in triples)
    text += f", from the float64 run's in {new} where the original differs in {own}"
    return (None, text, differing) if new <= ERROR_RATIO * own else (text, None, 0)


def _worst(stats: Sequence[ErrorStats]) -> ErrorStats:
    """The maximum of each error over several inputs."""
    names = [field.name for field in dataclasses.fields(ErrorStats)]
    return ErrorStats(*(max(getattr(one, name) for one in stats) for name in names))


def _measure(name: str, truth: Any, ours: Tensor, theirs: Tensor) -> tuple[ErrorStats, ErrorStats, str | None]:
    """Computes errors of the original's and of the optimized output, over values where the original is finite.

    If `truth` is unusable (data-dependent shape, overflow of a constant, another path through the model), the original
    is used instead, and the third result is a note on that.
    """
    note = None
    if not isinstance(truth, Tensor) or truth.shape != ours.shape:
        truth, note = ours, "has another shape there, so the original's output replaces it"
    dtype = ours.dtype
    truth, ours, theirs = _float64(truth), _float64(ours), _float64(theirs)
    finite = ours.isfinite()
    if not finite.all():
        truth, ours, theirs = truth[finite], ours[finite], theirs[finite]
    unknown = ~truth.isfinite()
    if unknown.any():
        truth = torch.where(unknown, ours, truth)
        note = f"has {int(unknown.sum())} values that are not finite there, so the original's values replace them"
    far = unknown
    if truth.numel():
        # Rounding errors next to zeros are not another path, such as for a norm over a single value.
        least = _FAR.get(dtype, 1e-2) * truth.abs().max().item() or math.sqrt(torch.finfo(dtype).eps)
        far = (ours - truth).abs() > least
    # If most values differ, the output consists of rounding errors, and `truth` is used.
    if 0 < far.sum() <= far.numel() / 2:
        truth = torch.where(far, ours, truth)
        note = f"has {int(far.sum())} values that rounding does not explain, so the original's values replace them"
    return _error_stats(name, truth, ours), _error_stats(name, truth, theirs), note


def _error_stats(name: str, truth: Tensor, value: Tensor) -> ErrorStats:
    """The `ErrorStats` of an output; `truth` and `value` are finite float64 tensors of one shape."""
    if truth.numel() == 0:
        return ErrorStats(name, 0.0, 0.0, 0.0, 0.0, 0.0)
    scale = truth.abs().max().item()
    error = (value - truth).abs_()
    absolute = (error.max().item(), error.mean().item())
    relative = (0.0 if err == 0 else err / scale if scale > 0 else math.inf for err in absolute)
    return ErrorStats(name, scale, *absolute, *relative)


def check_threshold(accuracy_threshold: float) -> None:
    """Raises ValueError unless the threshold is a number of at least 0. With NaN, every comparison would be False."""
    if not isinstance(accuracy_threshold, numbers.Real) or not accuracy_threshold >= 0:
        raise ValueError(f"accuracy_threshold must be a number of at least 0, not {accuracy_threshold!r}")


def _allowed_error(own: ErrorStats, dtype: torch.dtype, threshold: float) -> float:
    """The largest relative error that passes, for the original's error `own` in `dtype`."""
    ulp = torch.finfo(dtype).eps
    if own.max_rel == 0:
        return threshold + ULPS_WITHOUT_ERROR * ulp
    # The exact result rounded to dtype has an error of up to half a unit, so no implementation can be better.
    return max(threshold, ERROR_RATIO * own.max_rel, ulp / 2)


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().double()
