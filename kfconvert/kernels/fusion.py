"""Fused layers of kfconvert.ops."""

from .. import second_names

globals().update(second_names.of(__name__))

__all__ = list(second_names.TABLE[__name__])
