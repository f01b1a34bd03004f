"""Fusions of a user's own: a plain Python function is the pattern, another function takes the place of its matches."""

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
