"""The devices that tests run on: the CPU, and a GPU only where torch finds one; their compiled operators."""

import pytest
import torch

from kfconvert.extension import load_errors

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", CUDA] if torch.cuda.is_available() else ["cpu"]


def compiled_operators(device):
    """The operators under ``torch.ops.kfconvert`` with a compiled kernel for ``"cpu"`` or ``"cuda"``."""
    if device in load_errors:
        return set()
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("kfconvert::")}
    compiled = (name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()))
    return {name.removeprefix("kfconvert::") for name in compiled}


def without_onednn():
    """Returns a decorator of tests with NaN in bfloat16: on CPUs with AMX, oneDNN's products spread it to the row
    before."""
    return torch.backends.mkldnn.flags(enabled=False)
