"""Checks of the installation, with advice on how to fix problems."""

from __future__ import annotations

import importlib
import platform
from typing import NamedTuple

import torch

from .. import ops  # noqa: F401 - which registers the operators
from ..extension import CUDA_AVAILABLE, CUDA_KERNELS_LOADED, EXTENSION_LOADED, cpu_capability, load_errors
from ..version import __version__


class Check(NamedTuple):
    """A check of :func:`doctor`: its name, whether it passed, the detail, and advice if it failed."""

    name: str
    ok: bool
    detail: str
    advice: str


def compiled_operators(device_type: str) -> list[str]:
    """Returns the operators under ``torch.ops.kfconvert`` with a compiled kernel for ``"cpu"`` or ``"cuda"``."""
    if device_type in load_errors:
        return []
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("kfconvert::")}
    key = device_type.upper()
    return sorted(
        name.removeprefix("kfconvert::") for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    )


def build_info() -> dict:
    """Returns facts about this installation: versions, build settings, compiled operators, and GPUs.

    The keys of ``"build"`` come from kfconvert._C and are absent if that module was not built for this Python.
    """
    try:
        build = importlib.import_module("kfconvert._C").build_info()
    except ImportError as error:
        build = {"missing": f"kfconvert._C: {error}"}
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "kfconvert": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "extension_loaded": EXTENSION_LOADED,
        "cuda_available": CUDA_AVAILABLE,
        "load_errors": dict(load_errors),
        "build": build,
        "cpu_capability": cpu_capability(),
        "operators": {device: compiled_operators(device) for device in ("cpu", "cuda")},
        "devices": [
            {
                "name": torch.cuda.get_device_name(i),
                "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
                "memory_gib": round(torch.cuda.get_device_properties(i).total_memory / 2**30, 1),
            }
            for i in gpus
        ],
    }


def doctor() -> list[Check]:
    """Checks this installation. Checks come in the order in which a user fixes problems."""
    info = build_info()
    rebuild = "install a C++ compiler and run: pip install --no-build-isolation ."
    rebuild_cuda = "install the CUDA toolkit (nvcc) and run: pip install --no-build-isolation ."
    checks = [
        Check(
            "CPU kernels",
            EXTENSION_LOADED,
            f"loaded ({info['cpu_capability']})" if EXTENSION_LOADED else load_errors["cpu"],
            rebuild,
        )
    ]
    gpu = torch.cuda.is_available()
    if gpu:
        gpu_detail = ", ".join(
            f"{device['name']} (compute capability {device['compute_capability']})" for device in info["devices"]
        )
    else:
        gpu_detail = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU"
    checks.append(
        Check(
            "CUDA GPU",
            gpu,
            gpu_detail,
            "fine on a machine without a GPU; else check the driver and install a CUDA build of torch",
        )
    )
    checks.append(
        Check(
            "CUDA kernels",
            CUDA_KERNELS_LOADED,
            "loaded" if CUDA_KERNELS_LOADED else load_errors["cuda"],
            "fine on a machine without a GPU; else " + rebuild_cuda,
        )
    )
    archs = info["build"].get("cuda_archs", "").split()
    for device in info["devices"]:
        capability = device["compute_capability"].replace(".", "")
        fits = not archs or any(_runs_on(arch, capability, arch == archs[-1]) for arch in archs)
        checks.append(
            Check(
                "kernels fit the GPU",
                fits,
                f"built for {', '.join(archs) or 'unknown'}; {device['name']} is {capability}",
                f'rebuild with KFCONVERT_CUDA_ARCHS="{device["compute_capability"]}"',
            )
        )
    missing = info["build"].get("missing")
    checks.append(
        Check(
            "compiled guard",
            missing is None,
            missing or f"built by {info['build']['compiler']}",
            "results do not change, but guards of converted models run in Python, which is slower; install pybind11 "
            "and reinstall",
        )
    )
    return checks


def _runs_on(arch: str, capability: str, has_ptx: bool) -> bool:
    """Whether code for sm_<arch> runs on a compute capability: same major version, or any later one with PTX."""
    built, wanted = int(arch.rstrip("af")), int(capability)
    return built <= wanted and (built // 10 == wanted // 10 or has_ptx)
