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
from typing import Any, NamedTuple

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


class Original:
    """The original's outputs for one input, and their errors against `reference`, measured once for all candidates."""

    def __init__(self, reference: Reference, outputs: Any):
        self.reference, self.outputs, self._structure = reference, outputs, Outputs(outputs)
        truths = Outputs(reference.outputs).leaves
        self._each = {name: _Output(name, truths.get(name), leaf) for name, leaf in self._structure.leaves.items()}

    def run(self, optimized: Any) -> Run:
        """Measures the `optimized` model's outputs for this input."""
        theirs = Outputs(optimized)
        difference = self._structure.difference(theirs)
        each = {} if difference else {name: one.measured(theirs.leaves[name]) for name, one in self._each.items()}
        return self, difference, each

    def exact(self) -> Run:
        """The run of a model without errors."""
        return self, None, {name: _Measured(one, None, one.stats(0.0, 0.0)) for name, one in self._each.items()}


def compare(
    reference: Reference, original_out: Any, optimized_out: Any, accuracy_threshold: float = 1e-6
) -> ValidationResult:
    """Compares `optimized_out` by the rules of `validate_optimization`."""
    return compare_all([Original(reference, original_out).run(optimized_out)], accuracy_threshold)


def compare_all(runs: Sequence[Run], accuracy_threshold: float = 1e-6) -> ValidationResult:
    """Judges the runs for several inputs together.

    The rules of `validate_optimization` apply to the largest error of each output over all inputs, because the largest
    error of few output values is random.
    """
    originals, differences, leaves = list(zip(*runs))
    description = originals[0].reference.description
    reason = next(filter(None, differences), None)
    if reason is None and any(each.keys() != leaves[0].keys() for each in leaves):
        reason = "the structure of the original's outputs depends on the input"
    notes, errors, differing, unmeasured = [description], [], 0, []
    for name in leaves[0] if reason is None else ():
        measured: list[_Measured] = [each[name] for each in leaves]
        problem = next(filter(None, (each.problem for each in measured)), None)
        ours = measured[0].output.value
        if problem is None and isinstance(ours, Tensor) and not _inexact(ours):
            problem, remark, count = _judge_exact(measured)
            notes += [f"output{name} {remark}"] if remark else []
            differing += count
        elif problem is None and isinstance(ours, Tensor):
            own, new = _worst([each.output.own_error for each in measured]), _worst([each.error for each in measured])
            errors.append((own, new))
            if all(each.output.is_unmeasured for each in measured):
                unmeasured.append(name)
                notes.append(f"output{name} is entirely NaN or infinite: it was not compared")
            notes += dict.fromkeys(f"output{name} {each.output.note}" for each in measured if each.output.note)
            place, before, after = f"of its scale against the {description}", own.max_rel, new.max_rel
            allowed = _allowed_error(own, ours.dtype, accuracy_threshold)
            if own.scale == 0 and own.max_abs > 0:  # relative errors are undefined
                place, before, after = f"where the {description} is 0", own.max_abs, new.max_abs
                allowed = max(ERROR_RATIO * before, torch.finfo(ours.dtype).eps)
            if not after <= allowed:
                problem = f"has error {after:.1e} {place}; the original has {before:.1e}, allowed is {allowed:.1e}"
        reason = reason or (problem and f"output{name} {problem}")

    passed: bool | None = reason is None
    if passed and not leaves[0]:
        passed, reason = None, "the outputs have nothing that can be compared"
    elif passed and unmeasured and len(unmeasured) == len(errors):
        passed, reason = None, "nothing could be compared: all values of the outputs are NaN or infinite"
    elif errors and all(stats.scale == 0 for stats, _ in errors):
        notes.append("all outputs are 0, so previous layers were not checked")
    original, converted = (max(s, key=lambda one: one.max_rel) for s in zip(*errors)) if errors else (None, None)
    ratio = converted.max_rel / original.max_rel if converted and original and original.max_rel > 0 else None
    order = sorted(range(len(errors)), key=lambda place: -errors[place][1].max_rel)
    outputs, noted = tuple(errors[place] for place in sorted(order[:MOST_OUTPUTS])), "; ".join(notes)
    return ValidationResult(passed, reason, noted, original, converted, ratio, accuracy_threshold, differing, outputs)


def _unlike(ours: Any, theirs: Any) -> str | None:
    """The difference in type, device, layout (sparse, nested), shape or dtype of two tensors, or in other values."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        same = type(ours) is type(theirs) and ours == theirs
        return None if same else f"is {theirs!r:.40}, the original's is {ours!r:.40}"
    if ours.device != theirs.device:
        return f"is on {theirs.device}, the original's is on {ours.device}"
    if ours.is_nested != theirs.is_nested:
        return f"is {'' if theirs.is_nested else 'not '}nested, unlike the original's"
    if ours.layout is not theirs.layout:
        return f"has the layout {theirs.layout}, the original's {ours.layout}"
    ours, theirs = _dense(ours), _dense(theirs)
    if ours.shape != theirs.shape:
        return f"has shape {tuple(theirs.shape)}, the original's is {tuple(ours.shape)}"
    return None if ours.dtype == theirs.dtype else f"has dtype {theirs.dtype}, the original's is {ours.dtype}"


def _dense(value: Any) -> Any:
    """A comparable dense tensor: all elements of a nested tensor in one dimension, and zeros for the meta device."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype)
    if value.is_nested:
        return torch.cat([part.flatten() for part in value.unbind()])
    return value if value.layout is torch.strided else value.to_dense()


class _Measured(NamedTuple):
    """A model's output: its error, or differences of exact values from the float64 run's and from the original's."""

    output: _Output
    problem: str | None
    error: ErrorStats
    wrong: int = 0
    differing: int = 0


Run = tuple[Original, str | None, dict[str, _Measured]]  # the second is the difference in structure


class _Output:
    """An output of the original for one input, and its `truth` in the float64 run."""

    def __init__(self, name: str, truth: Any, stored: Any):
        self._name, self._stored, self.value, truth = name, stored, _dense(stored), _dense(truth)
        alike = isinstance(truth, Tensor) and isinstance(self.value, Tensor) and truth.shape == self.value.shape
        self.truth: Any = truth if alike else None
        self.note: str | None = None
        self._finite: Tensor | None = None  # mask of the original's finite values, if not all are
        self._scale, self.is_unmeasured = 0.0, False
        if isinstance(self.value, Tensor) and _inexact(self.value):
            self._complete_truth()
        own = self.measured(stored)  # refers to this object
        self.own_error, self.own_wrong = own.error, own.wrong

    def _complete_truth(self) -> None:
        """Sets the truth for values where the original is finite.

        If it is unusable (data-dependent shape, overflow of a constant, another path through the model), the original
        is used instead, and `note` states that.
        """
        truth, ours, dtype = self.truth, _float64(self.value), self.value.dtype
        if truth is None:
            truth, self.note = ours, "has another shape there, so the original's output replaces it"
        truth, finite = _float64(truth), ours.isfinite()
        if not finite.all():
            self._finite, truth, ours = finite, truth[finite], ours[finite]
            self.is_unmeasured = not self.value.isfinite().any()
        far = ~truth.isfinite()
        if far.any():
            truth = torch.where(far, ours, truth)
            self.note = f"has {int(far.sum())} values that are not finite there, so the original's values replace them"
        if truth.numel():
            # Rounding errors next to zeros are not another path, such as for a norm over a single value.
            least = _FAR.get(dtype, 1e-2) * truth.abs().max().item() or math.sqrt(torch.finfo(dtype).eps)
            far = (ours - truth).abs() > least
        # If most values differ, the output consists of rounding errors, and `truth` is used.
        if 0 < (count := int(far.sum())) <= far.numel() / 2:
            truth = torch.where(far, ours, truth)
            self.note = f"has {count} values that rounding does not explain, so the original's values replace them"
        self.truth, self._scale = truth, truth.abs().max().item() if truth.numel() else 0.0

    def measured(self, stored: Any) -> _Measured:
        """Compares a model's output. Positions of NaN and infinity must match, with the sign of infinities."""
        problem, theirs = _unlike(self._stored, stored), _dense(stored)
        if problem or not isinstance(theirs, Tensor):
            return _Measured(self, problem, self.stats(0.0, 0.0))
        if not _inexact(theirs):
            wrong = 0 if self.truth is None else int((theirs != self.truth).sum())
            return _Measured(self, None, self.stats(0.0, 0.0), wrong, int((theirs != self.value).sum()))
        # Outputs may be large: their values are read few times.
        theirs = _float64(theirs)
        error = ((theirs if self._finite is None else theirs[self._finite]) - self.truth).abs_()
        most, mean = (error.max().item(), error.mean().item()) if error.numel() else (0.0, 0.0)
        if self._finite is not None or not math.isfinite(most):
            kinds = [each.nan_to_num(0.0).where(~each.isfinite(), 1.0) for each in (_float64(self.value), theirs)]
            count = int((kinds[0] != kinds[1]).sum())
            problem = f"has NaN or infinity unlike the original's in {count} values" if count else None
        return _Measured(self, problem, self.stats(most, mean))

    def stats(self, *absolute: float) -> ErrorStats:
        relative = (0.0 if error == 0 else error / self._scale if self._scale > 0 else math.inf for error in absolute)
        return ErrorStats(self._name, self._scale, *absolute, *relative)


def _judge_exact(measured: Sequence[_Measured]) -> tuple[str | None, str | None, int]:
    """Judges integers or booleans. Returns (reason for a failure, note on accepted differences, their number)."""
    # Rounding decides some values (the order of nearly equal scores, the class of a tie). The optimized model may
    # therefore have ERROR_RATIO times as many differences from the float64 run as the original.
    differing = sum(each.differing for each in measured)
    if differing == 0:
        return None, None, 0
    total = sum(each.output.value.numel() for each in measured)
    text = f"differs from the original's in {differing} of {total} exact values"
    if not all(each.output.truth is not None for each in measured):
        return text, None, 0
    own, new = sum(each.output.own_wrong for each in measured), sum(each.wrong for each in measured)
    text += f", from the float64 run's in {new} where the original differs in {own}"
    return (None, text, differing) if new <= ERROR_RATIO * own else (text, None, 0)


def _worst(stats: Sequence[ErrorStats]) -> ErrorStats:
    """The maximum of each error over several inputs."""
    return ErrorStats(*map(max, zip(*map(dataclasses.astuple, stats))))


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
