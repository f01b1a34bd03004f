"""User-defined fusions: a Python function is the pattern, and another function replaces its matches."""

from .errors import PatternError
from .names import described, functions_in, rebuilt
from .registration import register_pattern, unregister_pattern
