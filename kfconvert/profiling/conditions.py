"""The environment of a measurement: device, threads and versions."""

import platform
from typing import Any

import torch

from ..extension import EXTENSION_LOADED
from ..version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Returns the environment of a measurement on ``device``, ready for JSON: "torch", "kfconvert", "python", "device",
    "threads", and "extension" (whether compiled kernels are available)."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "kfconvert": __version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "extension": EXTENSION_LOADED,
    }
