"""The ``kfconvert`` command."""

from .command import main
