"""Canonical forms of the different spellings of a computation in a graph."""

from .contiguous import KeptContiguous
from .passes import canonicalise
from .views import settled_layouts, unsettled
