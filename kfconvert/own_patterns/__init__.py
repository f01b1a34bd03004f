"""User-defined fusions: a Python function is the pattern, and another function replaces its matches."""

from .errors import PatternError
from .match import MatchedTensor, OwnMatch
from .names import described, functions_in, rebuilt
from .registration import register_pattern, unregister_pattern

__all__ = [
    "MatchedTensor",
    "OwnMatch",
    "PatternError",
    "described",
    "functions_in",
    "rebuilt",
    "register_pattern",
    "unregister_pattern",
]
