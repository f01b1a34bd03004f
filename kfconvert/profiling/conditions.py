"""What times depend on besides the model: the device, the threads, and the versions."""

import platform
from typing import Any

import torch

from ..extension import EXTENSION_LOADED
from ..version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """What a measurement on ``device`` depends on, ready for JSON: "torch", "kfconvert", "python", "device", "threads",
    and "extension", which tells whether the compiled kernels are there."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "kfconvert": __version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "extension": EXTENSION_LOADED,
    }
