"""Reductions of kfconvert.ops, by the group in which people look for them."""

from .. import second_names

globals().update(second_names.of(__name__))

__all__ = list(second_names.TABLE[__name__])
