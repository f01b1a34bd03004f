"""Every operator test runs on the CPU and, where torch finds one, on a GPU."""

import os

import pytest
from support.devices import DEVICES

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["compiled", "composition"])
def compiled(request, monkeypatch):
    """Both paths of the public functions: the compiled kernels, and plain ATen as without a library.

    Without a library a function returns its reference. Tests that compare it with the reference do not use this
    fixture; test_compositions.py covers that path. Tests of errors, dtypes and random numbers use it.
    """
    from kfconvert import extension

    if not request.param:
        monkeypatch.setattr(extension, "EXTENSION_LOADED", False)
        monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", False)
    return request.param
