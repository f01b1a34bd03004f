"""The error of user-defined patterns."""


class PatternError(ValueError):
    """Raised if a pattern cannot be registered or restored. The message has one line."""
