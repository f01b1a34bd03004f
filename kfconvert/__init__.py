"""kfconvert: finds the fusable operations in a PyTorch model, swaps in fused modules, and proves the result.

The front door: ``auto_convert_model`` for one call, ``ModelConverter`` for its options and statistics, ``save`` and
``load`` for artifacts, ``modules`` and ``ops`` to use the fused pieces by hand.
"""

from . import modules, ops
from .artifact import load, save
from .converter import ConversionError, ModelConverter, auto_convert_model
from .extension import CUDA_AVAILABLE, EXTENSION_LOADED
from .validator import validate_optimization
from .version import __version__

__all__ = [
    "CUDA_AVAILABLE",
    "EXTENSION_LOADED",
    "ConversionError",
    "ModelConverter",
    "__version__",
    "auto_convert_model",
    "load",
    "modules",
    "ops",
    "save",
    "validate_optimization",
]
