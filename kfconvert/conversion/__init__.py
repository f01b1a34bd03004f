"""The steps of a conversion, its measurements and decisions, and its statistics."""

from .captures import Captures, captured_steps, gathered, note_layouts
from .checks import (
    ConversionError,
    check_arguments,
    check_callback,
    check_methods,
    check_thread,
    first_line,
    resolve_device,
)
from .config import ConversionConfig, takes_options
from .control import FilterFn, check_names, controlled
from .decision_log import log_decisions
from .effort import EFFORTS
from .generated_kernels import generate_again
from .own_state import OwnState
from .pipeline import convert
from .preparation import Request
from .result import Result
from .rollback import AsGiven, given_back_on_error
from .selector import Decision
from .sites import match
from .stages import Progress, Stages
from .steps import calls_between_checks, hand_over, leave_as_it_is, merge_weights, programs, replace
