"""What a conversion did, for people: a table, and a tree of the modules; and what calls do, for a monitoring system."""

from .explain import Explanation, module_classes
from .prometheus import prometheus_text
from .table import accuracy_line, memory_line, render, speed_line

__all__ = [
    "Explanation",
    "accuracy_line",
    "memory_line",
    "module_classes",
    "prometheus_text",
    "render",
    "speed_line",
]
