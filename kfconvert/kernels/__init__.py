"""The implementations of the operators one by one; ``kfconvert.ops`` picks the fastest for a device."""

from . import reference

__all__ = ["reference"]
