"""kfconvert: finds fusable operations in a PyTorch model, replaces them with fused modules, and validates the result.

Public API: ``auto_convert_model`` converts in one call, ``ModelConverter`` also has statistics, ``ConversionConfig``
has options, ``save`` and ``load`` handle artifacts, ``export`` creates programs of ``torch.export``, ``freeze``
prepares for deployment, ``register_pattern`` adds user-defined fusions. ``modules`` and ``ops`` have the fused modules
and operators for direct use, ``kernels`` their implementations, and ``profiling`` measures them.
``get_cuda_compiler`` compiles user CUDA sources.
"""

import importlib
import random
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:  # editors and type checkers do not evaluate __getattr__
    from . import auto_convert, explain, jit, kernels, modules, ops, profiling
    from .artifact import ArtifactError, export, load, save
    from .converter import ConversionConfig, ConversionError, ModelConverter, auto_convert_model
    from .extension import CUDA_AVAILABLE, EXTENSION_LOADED
    from .inputs import Weighted
    from .jit import CompileError, get_cuda_compiler
    from .own_patterns import PatternError, register_pattern, unregister_pattern
    from .report import prometheus_text
    from .runtime import FrozenError, freeze
    from .validator import validate_optimization

# The public names by module. They are imported on first use, because `kfconvert --help` must not wait for torch.
_NAMES = {
    "artifact": ("ArtifactError", "export", "load", "save"),
    "converter": ("ConversionConfig", "ConversionError", "ModelConverter", "auto_convert_model"),
    "extension": ("CUDA_AVAILABLE", "EXTENSION_LOADED"),
    "inputs": ("Weighted",),
    "jit": ("CompileError", "get_cuda_compiler"),
    "own_patterns": ("PatternError", "register_pattern", "unregister_pattern"),
    "report": ("prometheus_text",),
    "runtime": ("FrozenError", "freeze"),
    "validator": ("validate_optimization",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_PACKAGES = ("auto_convert", "explain", "jit", "kernels", "modules", "ops", "profiling")

__all__ = [
    "CUDA_AVAILABLE",
    "EXTENSION_LOADED",
    "ArtifactError",
    "CompileError",
    "ConversionConfig",
    "ConversionError",
    "FrozenError",
    "ModelConverter",
    "PatternError",
    "Weighted",
    "__version__",
    "auto_convert",
    "auto_convert_model",
    "explain",
    "export",
    "freeze",
    "get_cuda_compiler",
    "jit",
    "kernels",
    "load",
    "modules",
    "ops",
    "profiling",
    "prometheus_text",
    "register_pattern",
    "save",
    "unregister_pattern",
    "validate_optimization",
]

# The import of rich draws a random number from Python's generator, which must not affect a seeded generator.
_before = random.getstate()
importlib.import_module("rich.style")
random.setstate(_before)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
