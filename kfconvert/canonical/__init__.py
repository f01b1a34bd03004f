"""The many spellings of one computation in a graph brought to one."""

from .contiguous import KeptContiguous
from .passes import canonicalise
from .views import settled_layouts, unsettled

__all__ = [
    "KeptContiguous",
    "canonicalise",
    "settled_layouts",
    "unsettled",
]
