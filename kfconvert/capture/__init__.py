"""Captures modules as graphs: the model in each of its call forms, and its parts."""

from .argument_trials import reads_layout
from .call_forms import capture_form, refused_in_every_form
from .captured import Capture, capture, recaptured
from .compiler_questions import compiling_in_this_thread
from .deadline import Budget
from .generation import Known, capture_generation, prompt_of
from .methods import methods_with_modules
from .module_times import Clock, timed_modules
from .parts import Part, Parts, Refused, parents
from .stored_captures import (
    Places,
    checked_code,
    evidence_of_regions,
    named_classes,
    rebuilt_region,
    stored_region,
)
from .structure import groups
from .submodule_calls import around, observe
from .tracer import trace
from .trial_runs import TOLERANCES, with_few
