"""The steps of a conversion, its measurements and decisions, and its statistics."""

from .captures import Captures, gathered, trace
from .config import ConversionConfig, takes_options
from .control import FilterFn, check_names, controlled, with_chosen
from .decision_log import log_decisions
from .effort import EFFORTS, Effort
from .layouts import Layouts
from .memory_bound import drop_for_memory
from .memory_use import memory
from .own_state import OwnState
from .preparation import (
    ConversionError,
    Prepared,
    check_arguments,
    check_model,
    check_thread,
    first_line,
    prepare,
    resolve_device,
)
from .rollback import AsGiven, given_back_on_error
from .selector import Decision, Selector
from .serving import Served, reject_slower_methods, replace_served
from .sites import match
from .stages import Progress, Stages
from .statistics import ConversionStats
from .steps import (
    Result,
    calls_between_checks,
    check_callback,
    hand_over,
    leave_as_it_is,
    merge_weights,
    programs,
    replace,
    time,
    without_gain,
)
from .time_shares import shares_of_time
from .validation import revert, validate
from .workloads import Load, Loads

__all__ = [
    "AsGiven",
    "Captures",
    "ConversionConfig",
    "ConversionError",
    "ConversionStats",
    "Decision",
    "EFFORTS",
    "Effort",
    "FilterFn",
    "Layouts",
    "Load",
    "Loads",
    "OwnState",
    "Prepared",
    "Progress",
    "Result",
    "Selector",
    "Served",
    "Stages",
    "calls_between_checks",
    "check_arguments",
    "check_callback",
    "check_model",
    "check_names",
    "check_thread",
    "controlled",
    "drop_for_memory",
    "first_line",
    "gathered",
    "given_back_on_error",
    "hand_over",
    "leave_as_it_is",
    "log_decisions",
    "match",
    "memory",
    "merge_weights",
    "prepare",
    "programs",
    "reject_slower_methods",
    "replace",
    "replace_served",
    "resolve_device",
    "revert",
    "shares_of_time",
    "takes_options",
    "time",
    "trace",
    "validate",
    "without_gain",
    "with_chosen",
]
