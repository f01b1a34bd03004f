"""The conversion under another name of its module: see kfconvert.converter and kfconvert.validator."""

from . import second_names

globals().update(second_names.of(__name__))

__all__ = list(second_names.TABLE[__name__])
