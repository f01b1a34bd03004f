"""Checks whether the code behind a model, and the switches that it reads, have changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...process import is_of_trace, methods_stand_over, stood_over, switched_off
from ...region import Read
from .code import CodeWalk
from .references import Holdings
from .watch import MISSING, SIZE, Entry, Watch, renewed

_GETTERS = (
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32",
    "_get_cublas_allow_tf32", "_get_mkldnn_enabled", "_get_float32_matmul_precision", "_get_flash_sdp_enabled",
    "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_deterministic_algorithms_warn_only",
    "_is_multithreading_enabled",
)  # fmt: skip
# Switches that code can read.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "_get_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "get_deterministic_debug_mode": torch.get_deterministic_debug_mode,
    "is_anomaly_enabled": torch.is_anomaly_enabled,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "allow_tf32": lambda: (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "deterministic": lambda: torch.backends.cudnn.deterministic,
    "enabled": lambda: (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
    "allow_fp16_reduced_precision_reduction": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "get_fastpath_enabled": torch.backends.mha.get_fastpath_enabled,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "get_default_device": torch.get_default_device,
    "initial_seed": torch.initial_seed,
    "get_num_threads": torch.get_num_threads,
    "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill_uninitialized_memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "is_anomaly_check_nan_enabled": torch.is_anomaly_check_nan_enabled,
    "is_warn_always_enabled": torch.is_warn_always_enabled,
    "is_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "engine": lambda: torch.backends.quantized.engine,
    "get_autocast_dtype": lambda: (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
    "get_autocast_cpu_dtype": lambda: torch.get_autocast_dtype("cpu"),
    "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype("cuda"),
    **{name: getattr(torch._C, name) for name in _GETTERS if hasattr(torch._C, name)},
}


class Codes:
    """The code behind modules that are looked up in sequence, without changes in between. Layers of equal structure
    share one code."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Code] = {}

    def of(self, held: Holdings, reads: frozenset[Read]) -> Code:
        modules = [*held.model.modules(), *held.outside]
        classes = tuple(dict.fromkeys(type(each) for each in (*modules, *held.configurations)))
        key = classes, tuple(map(id, held.functions)), reads
        if key not in self._known:
            self._known[key] = Code(CodeWalk(classes, held.functions, reads))
        return self._known[key]


class Code:
    """The Python code behind a model, which all copies of the model share."""

    def __init__(self, walk: CodeWalk):
        found = list(walk.entries())
        self.asked_for = frozenset(walk.asked_for)
        self.functions = walk.functions()
        self.switches = {name: asked() for name, asked in _SWITCHES.items() if name in self.asked_for}
        self.watch = Watch(entry for _, entry in found)
        self.watch.first_change()  # resolves the attribute dicts of the entries
        self.names = [name for name, _ in found]

    def switched(self) -> str | None:
        """The changed process switch that the code reads; None where all have their former values."""
        for name, before in self.switches.items():
            if _SWITCHES[name]() != before:
                return f"the model's code reads {name}, which was {before} at the conversion"
        return None

    def refusal(self) -> str | None:
        """None where the code is unchanged, else the reason."""
        watch = self.watch
        changed = watch.first_change()
        if changed is not None and (switched_off() or torch.compiler.is_exporting() or methods_stand_over()):
            for _ in range(2):  # twice, as a trace may begin in between
                changed = Watch(map(_during_trace, watch.entries)).first_change()
                if changed is None:
                    break
        elif changed is not None:
            self.watch, changed = renewed(watch, changed)
        return None if changed is None else f"{self.names[changed]} was replaced after the conversion; convert it again"

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self


def _during_trace(entry: Entry) -> Entry:
    """``entry``, or an entry that always holds where a trace in another thread temporarily violates ``entry``."""
    holder, key, expected = entry
    if not (isinstance(holder, dict) and isinstance(key, str)):
        return entry
    found = holder.get(key)
    if found is not expected and (stood_over(found, MISSING) is expected or is_of_trace(found, expected)):
        return {}, SIZE, 0
    return entry
