"""Reports of a conversion for people (table, module tree, HTML page) and call counters for a monitoring system."""

from .explain import Explanation, module_classes
from .html import fragment, page
from .pairwise import comparison, render_comparison
from .prometheus import prometheus_text
from .table import accuracy_line, given_back, memory_line, render, report_text, speed_line, speedup_line
from .words import timing_text
