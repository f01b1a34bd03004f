"""Whether the code behind a model, and the switches that it asks for, are as they were."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from ..process import is_of_trace, methods_stand_over, stood_over, switched_off
from ..region import Read
from .code import CodeWalk, code_walk
from .configuration import HELD_BY_ALL, WHOLE, names_by_class, settings_of
from .contents import first_different, is_of_project
from .holdings import Holdings
from .watch import MISSING, SIZE, Entry, Watch, renewed
from .watched_places import CHANGED

_GETTERS = (
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_allow_tf32",
    "_get_cublas_allow_tf32", "_get_mkldnn_enabled", "_get_float32_matmul_precision", "_get_flash_sdp_enabled",
    "_get_math_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_deterministic_algorithms_warn_only",
    "_is_multithreading_enabled",
)  # fmt: skip
# Switches that code can ask for.
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
_CONTAINERS = (list, tuple, dict, set)


class Codes:
    """The code behind modules that are looked at one after the other, with nothing changed in between. Layers of one
    structure have one code, which takes most of the time that it takes to watch a module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Code] = {}

    def of(self, held: Holdings, reads: frozenset[Read], looks: bool) -> Code:
        modules = [*held.model.modules(), *held.outside]
        classes = [*(type(each) for each in (*modules, *held.configurations)), *held.types]
        words = frozenset(_words(held, reads))
        # What a walk meets depends on these, and on the model itself where it meets modules, which may be its own.
        key = tuple(dict.fromkeys(classes)), tuple(map(id, held.functions)), words, reads, looks
        known = None if held.outside else self._known.get(key)
        if known is not None:
            return known
        walk = code_walk(classes, held.functions, reads, held, looks)
        walk.words.update(words)
        code = Code(walk)
        if not (held.outside or walk.meets_modules or walk.contents.meets_modules or held.around):
            self._known[key] = code
        return code


class Code:
    """The Python code behind a model, which all copies of the model share."""

    def __init__(self, walk: CodeWalk):
        found = list(walk.entries())
        self.asked_for = frozenset(walk.asked_for)
        # What a function with a cache reads was not seen in the trace if its answer was there already.
        self.of_cached = frozenset(walk.of_cached)
        self.around = frozenset(walk.around)
        self.named_by_handlers = frozenset(walk.named_by_handlers)
        self.held_by_text = walk.texts_among(WHOLE | HELD_BY_ALL)
        self.compared = walk.contents.compared
        self.switches = {name: asked() for name, asked in _SWITCHES.items() if name in self.asked_for}
        self.watch = Watch(entry for _, entry in found)
        self.watch.first_change()  # which looks up the dicts of attributes that the entries speak of
        self.names = [name for name, _ in found]
        # Whether a container was replaced by an equal one since, of which nothing is watched that it holds.
        self.is_outdated = False

    def switched(self) -> str | None:
        """Which switch of the process, for which the code asks, is not as it was; None where all are."""
        for name, before in self.switches.items():
            if _SWITCHES[name]() != before:
                return f"its code asks for {name}, which was {before} at the conversion"
        return None

    def refusal(self, closely: bool) -> str | None:
        """None where the code is as it was, else what is not; ``closely`` as for ``first_different``."""
        different = first_different(self.compared, closely)
        if different is not None:
            return f"what {different} holds {CHANGED}"
        watch = self.watch
        changed = watch.first_change()
        if changed is not None and (switched_off() or torch.compiler.is_exporting() or methods_stand_over()):
            for _ in range(2):  # twice, as the trace may begin to replace things in between
                changed = Watch(map(_beside_trace, watch.entries)).first_change()
                if changed is None:
                    break
        elif changed is not None:
            self.watch, changed = renewed(watch, changed)
            before, now = ([value for _, _, value in each.entries] for each in (watch, self.watch))
            self.is_outdated |= any(a is not b and isinstance(b, _CONTAINERS) for a, b in zip(before, now))
        return None if changed is None else f"{self.names[changed]} was replaced after the conversion; convert it again"

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self


def read_around(held: Holdings, around: frozenset[str]) -> set[Read]:
    """What may have been read unseen by code of the Python modules ``around``, which goes around the way in which
    classes look up attributes: all attributes of instances of classes there and, for code of the user's own, of all
    such classes."""

    def is_read(kind: type) -> bool:
        if any(base.__module__ in around for base in kind.__mro__):
            return True
        return is_of_project(kind.__module__) and any(map(is_of_project, around))

    found: set[Read] = set()
    if around:
        found.update((type(module), "__dict__") for module in held.model.modules() if is_read(type(module)))
        for config in held.configurations:
            if is_read(type(config)):
                found |= {(type(config), "__dict__"), *settings_of(config)}
    return found


def _words(held: Holdings, reads: frozenset[Read]) -> Iterator[str]:
    """The texts that were read of modules and objects, by which code may look something up."""
    by_class, of_objects = names_by_class(reads), {read for read in reads if isinstance(read, str)}
    modules = list(held.model.modules())
    holders: list[tuple[Any, set[str]]] = [(module, by_class.get(type(module), set())) for module in modules]
    holders += [(config, of_objects) for config in held.configurations]
    for kind in set(map(type, modules)):
        yield from (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}", str(kind))
    for holder, names in holders:
        yield from (value for name in names & vars(holder).keys() if type(value := vars(holder)[name]) is str)


def _beside_trace(entry: Entry) -> Entry:
    """``entry``; or, if a trace in another thread makes it fail for now, an entry that always holds."""
    holder, key, expected = entry
    if not (isinstance(holder, dict) and isinstance(key, str)):
        return entry
    found = holder.get(key)
    if found is not expected and (stood_over(found, MISSING) is expected or is_of_trace(found, expected)):
        return {}, SIZE, 0
    return entry
