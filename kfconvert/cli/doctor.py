"""Checks of the installation, with advice on how to fix problems."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from ..extension import CUDA_KERNELS_LOADED, EXTENSION_LOADED, cpu_capability, load_errors


class Check(NamedTuple):
    """A check of :func:`doctor`: its name, whether it passed, the detail, and advice if it failed."""

    name: str
    ok: bool
    detail: str
    advice: str


def doctor() -> list[Check]:
    """Checks this installation. Checks come in the order in which a user fixes problems."""
    try:
        build = importlib.import_module("kfconvert._C").build_info()
    except ImportError as error:  # it was not built for this Python
        build = {"missing": f"kfconvert._C: {error}"}
    rebuild = "run: pip install --no-build-isolation ."
    no_gpu = "fine on a machine without a GPU; else"
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    capabilities = {torch.cuda.get_device_name(gpu): torch.cuda.get_device_capability(gpu) for gpu in gpus}
    found = ", ".join(f"{name} (compute capability {major}.{minor})" for name, (major, minor) in capabilities.items())
    without = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
    loaded = f"loaded ({cpu_capability()})" if EXTENSION_LOADED else load_errors["cpu"]
    loaded_cuda = "loaded" if CUDA_KERNELS_LOADED else load_errors["cuda"]
    archs = build.get("cuda_archs", "").split()
    fits = [
        Check(
            "kernels fit the GPU",
            not archs or any(_runs_on(arch, f"{major}{minor}", arch == archs[-1]) for arch in archs),
            f"built for {', '.join(archs) or 'unknown'}; {name} is {major}{minor}",
            f'rebuild with KFCONVERT_CUDA_ARCHS="{major}.{minor}"',
        )
        for name, (major, minor) in capabilities.items()
    ]
    return [
        Check("CPU kernels", EXTENSION_LOADED, loaded, f"install a C++ compiler and {rebuild}"),
        Check("CUDA GPU", bool(gpus), found or without, f"{no_gpu} check the driver and install a CUDA build of torch"),
        Check(
            "CUDA kernels", CUDA_KERNELS_LOADED, loaded_cuda, f"{no_gpu} install the CUDA toolkit (nvcc) and {rebuild}"
        ),
        *fits,
        Check(
            "compiled guard",
            "missing" not in build,
            build.get("missing") or f"built by {build['compiler']}",
            "results do not change, but guards of converted models run in Python, which is slower; install pybind11 "
            "and reinstall",
        ),
    ]


def _runs_on(arch: str, capability: str, has_ptx: bool) -> bool:
    """Whether code for sm_<arch> runs on a compute capability: same major version, or any later one with PTX."""
    built, wanted = int(arch.rstrip("af")), int(capability)
    return built <= wanted and (built // 10 == wanted // 10 or has_ptx)
