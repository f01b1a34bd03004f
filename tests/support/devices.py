"""The devices that tests run on: the CPU, and a GPU only where torch finds one."""

import pytest
import torch

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ["cpu", CUDA] if torch.cuda.is_available() else ["cpu"]
