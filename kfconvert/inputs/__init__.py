"""Example inputs: from the user, as a call, and as JSON."""

from .caches import TreeForm, UnknownCache, caches_in, is_cache, map_tensors, taken_apart
from .call_form import MAX_SPELLINGS, CallForm
from .equality import is_equal
from .example import (
    ExampleCall,
    InputError,
    copy_of,
    example_call,
    holds_tokens,
    is_token_model,
    is_whole,
    numbered,
    resized,
    shown,
    to_each,
    token_calls,
    variations,
    widened,
)
from .lookups import BoundedLookups, bounded_lookups
from .records import ClassName, class_name
from .spec import InputSpecError, build, described
from .static_cache import capacity_for, is_static_kind, static_key_values
from .stored_values import Reader, Unstorable, Writer
from .weighted_inputs import Weighted, weighted

__all__ = [
    "BoundedLookups",
    "CallForm",
    "ClassName",
    "ExampleCall",
    "InputError",
    "InputSpecError",
    "MAX_SPELLINGS",
    "Reader",
    "TreeForm",
    "UnknownCache",
    "Unstorable",
    "Weighted",
    "Writer",
    "bounded_lookups",
    "build",
    "capacity_for",
    "caches_in",
    "class_name",
    "copy_of",
    "described",
    "shown",
    "example_call",
    "holds_tokens",
    "is_cache",
    "is_equal",
    "is_static_kind",
    "is_token_model",
    "is_whole",
    "map_tensors",
    "numbered",
    "resized",
    "static_key_values",
    "taken_apart",
    "to_each",
    "token_calls",
    "variations",
    "weighted",
    "widened",
]
