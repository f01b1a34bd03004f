"""Captures modules as graphs: the model in each of its call forms, and its parts."""

from .assignments import only_assigned
from .call_forms import capture_forms, refused_in_every_form
from .captured import Capture, capture, recaptured, unfit_tensor
from .compiler_questions import compiling_in_this_thread
from .deadline import Budget
from .generation import capture_generation, prompt_of
from .methods import methods_with_modules
from .own_writes import ALWAYS, BY_SHAPE, Attribute, Change, WrittenState, assigned_in, run_keeping, written_state
from .parts import Part, Parts, Refused, parents
from .structure import groups
from .submodule_calls import around, observe
from .tracer import trace
from .trial_runs import with_few

__all__ = [
    "ALWAYS",
    "Attribute",
    "BY_SHAPE",
    "Budget",
    "Capture",
    "Change",
    "Part",
    "Parts",
    "Refused",
    "around",
    "assigned_in",
    "capture",
    "capture_forms",
    "capture_generation",
    "compiling_in_this_thread",
    "groups",
    "methods_with_modules",
    "observe",
    "only_assigned",
    "parents",
    "prompt_of",
    "recaptured",
    "refused_in_every_form",
    "run_keeping",
    "trace",
    "unfit_tensor",
    "WrittenState",
    "with_few",
    "written_state",
]
