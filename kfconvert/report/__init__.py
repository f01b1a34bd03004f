"""What a conversion did, for people: a table, and a tree of the modules."""

from .explain import Explanation, module_classes
from .table import render

__all__ = [
    "Explanation",
    "module_classes",
    "render",
]
