"""Measures functions and models: time, memory traffic, kernel launches and allocations of calls."""

from .allocations import Allocation, allocation, bytes_of
from .bandwidth import copy_bandwidth
from .benchmarks import benchmark_kernel, profile_model_inference, quick_benchmark
from .candidates import COMPILED, CONVERTED, EAGER, Candidate, compare_candidates, compiled, failure_line, release
from .comparison import Comparison, Speedup, Timing, compare_timings
from .conditions import environment
from .implementations import ImplementationResult, KernelProfiler, compare_functions
from .measurement import Measurement, bytes_text, time_text
from .plot import bar_chart

__all__ = [
    "Allocation",
    "COMPILED",
    "CONVERTED",
    "Candidate",
    "Comparison",
    "EAGER",
    "ImplementationResult",
    "KernelProfiler",
    "Measurement",
    "Speedup",
    "Timing",
    "allocation",
    "bar_chart",
    "benchmark_kernel",
    "bytes_of",
    "bytes_text",
    "compare_candidates",
    "compare_functions",
    "compare_timings",
    "compiled",
    "copy_bandwidth",
    "environment",
    "failure_line",
    "profile_model_inference",
    "quick_benchmark",
    "release",
    "time_text",
]
