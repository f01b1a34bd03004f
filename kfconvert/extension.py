"""Loads the compiled libraries once and records their state.

``EXTENSION_LOADED``   the compiled CPU kernels are in use.
``CUDA_AVAILABLE``     torch can use a CUDA GPU here *and* the compiled CUDA kernels are in use.

If one of them is False, the operators run on plain ATen. ``load_errors`` has the reason, a warning at import repeats it
if a library exists but could not be loaded, and ``doctor()`` reports how to fix it.
"""

import ctypes
import warnings
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent

load_errors: dict[str, str] = {}
"""Maps a device type to the reason why its kernels are not in use; without a key, they are in use."""


def _load(device_type: str) -> bool:
    path = _FOLDER / f"_ops_{device_type}.so"
    if device_type == "cuda" and torch.version.cuda is None:
        load_errors[device_type] = "this torch is built without CUDA"
        return False
    if not path.exists():
        load_errors[device_type] = f"{path.name} was not built"
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = str(error.__cause__ or error)  # the cause has the loader's message
        load_errors[device_type] = reason
        warnings.warn(
            f"kfconvert: {path.name} could not be loaded, its operators run on plain ATen: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


EXTENSION_LOADED: bool = _load("cpu")
CUDA_KERNELS_LOADED: bool = _load("cuda")
CUDA_AVAILABLE: bool = CUDA_KERNELS_LOADED and torch.cuda.is_available()


def builds() -> list[str]:
    """Returns the compiled libraries in use, each with its size in bytes and build time."""
    loaded = [name for name, there in (("cpu", EXTENSION_LOADED), ("cuda", CUDA_KERNELS_LOADED)) if there]
    stats = {name: (_FOLDER / f"_ops_{name}.so").stat() for name in loaded}
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]


def cpu_capability() -> str | None:
    """Returns the instruction set of the CPU kernels: "generic", "avx2" or "avx512"; None without the library."""
    if not EXTENSION_LOADED:
        return None
    function = ctypes.CDLL(str(_FOLDER / "_ops_cpu.so")).kfconvert_cpu_capability
    function.restype = ctypes.c_char_p
    return function().decode()
