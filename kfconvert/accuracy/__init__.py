"""Errors of outputs against the original in float64."""

from .comparison import ERROR_RATIO, Original, ValidationResult, check_threshold, compare, compare_all, split_inputs
from .copying import copied_model
from .float64_run import (
    Reference,
    evaluation,
    in_float64,
    model_outputs,
    one_line,
    reference_outputs,
    seeded,
    with_gradients,
)
from .outputs import are_close, is_close, is_same_tensor
