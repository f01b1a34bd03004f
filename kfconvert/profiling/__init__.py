"""How fast functions and models are, and what their calls move, launch and allocate."""

from .allocations import Allocation, allocation, bytes_of
from .bandwidth import copy_bandwidth
from .benchmarks import benchmark_kernel, quick_benchmark
from .comparison import Comparison, Speedup, Timing, benchmark_callable, compare_timings
from .implementations import ImplementationResult, KernelProfiler, compare_functions
from .measurement import Measurement, bytes_text, time_text
from .models import profile_model_inference
from .operator_calls import count_operators
from .plot import bar_chart

__all__ = [
    "Allocation",
    "Comparison",
    "ImplementationResult",
    "KernelProfiler",
    "Measurement",
    "Speedup",
    "Timing",
    "allocation",
    "bar_chart",
    "benchmark_callable",
    "benchmark_kernel",
    "bytes_of",
    "bytes_text",
    "compare_functions",
    "compare_timings",
    "copy_bandwidth",
    "count_operators",
    "profile_model_inference",
    "quick_benchmark",
    "time_text",
]
