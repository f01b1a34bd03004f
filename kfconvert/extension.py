"""Loads the compiled libraries once and tells what this installation has.

``EXTENSION_LOADED``   the compiled CPU kernels are in use.
``CUDA_AVAILABLE``     torch can use a CUDA GPU here *and* the compiled CUDA kernels are in use.

Where either is False the operators still work, on plain ATen; ``load_errors`` holds the reason, a warning at
import repeats it when a library was there and could not be loaded, and ``doctor()`` says what to do about it.
"""

import ctypes
import warnings
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent

load_errors: dict[str, str] = {}
"""device type -> why its kernels are not in use; an absent key means that they are."""


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
        reason = str(error.__cause__ or error)  # torch puts the loader's own words into the cause
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
    """The compiled libraries that are in use, each with its size in bytes and the time at which it was built."""
    loaded = [name for name, there in (("cpu", EXTENSION_LOADED), ("cuda", CUDA_KERNELS_LOADED)) if there]
    stats = {name: (_FOLDER / f"_ops_{name}.so").stat() for name in loaded}
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats.items()]


def cpu_capability() -> str | None:
    """The instruction set of the CPU kernels: "generic", "avx2" or "avx512"; None without the library."""
    if not EXTENSION_LOADED:
        return None
    function = ctypes.CDLL(str(_FOLDER / "_ops_cpu.so")).kfconvert_cpu_capability
    function.restype = ctypes.c_char_p
    return function().decode()
