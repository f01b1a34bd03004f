"""Canonical forms of the different spellings of a computation in a graph."""

from .batch_norms import QuickBatchNorms, is_traced_batch_norm, restore_batch_norms
from .contiguous import KeptContiguous
from .passes import canonicalise
from .views import settled_layouts, unsettled

__all__ = [
    "KeptContiguous",
    "QuickBatchNorms",
    "canonicalise",
    "is_traced_batch_norm",
    "restore_batch_norms",
    "settled_layouts",
    "unsettled",
]
