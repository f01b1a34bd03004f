"""Example inputs: from the user, as a call, and as JSON."""

from .caches import TreeForm, UnknownCache, caches_in, map_tensors, taken_apart
from .call_form import MAX_SPELLINGS, CallForm
from .equality import is_equal
from .example import (
    ExampleCall,
    InputError,
    call_of,
    copy_of,
    example_call,
    holds_tokens,
    is_token_model,
    is_whole,
    numbered,
    repeated_to,
    resized,
    shown,
    to_each,
    token_calls,
    variations,
    widened,
)
from .lookups import bounded_lookups
from .records import ClassName, class_name
from .spec import InputSpecError, build, described
from .static_cache import capacity_for, is_static_kind, static_key_values
from .stored_values import Reader, Unstorable, Writer
from .weighted_inputs import Weighted, weighted
