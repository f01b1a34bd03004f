"""The ``kfconvert`` command."""

from .command import main

__all__ = [
    "main",
]
