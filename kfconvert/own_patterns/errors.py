"""The error of this room."""


class PatternError(ValueError):
    """A pattern that cannot be registered, or found again. One clear line."""
