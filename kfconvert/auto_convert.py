"""An alias of the conversion's modules: see kfconvert.converter and kfconvert.validator."""

from . import second_names

globals().update(second_names.of(__name__))

__all__ = list(second_names.TABLE[__name__])
