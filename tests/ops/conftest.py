"""Every operator test runs on the CPU and, marked ``cuda``, on a GPU."""

import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["compiled", "composition"])
def compiled(request, monkeypatch):
    """Both paths of the public functions: the compiled kernels, and plain ATen as without a library."""
    from kfconvert import extension

    if not request.param:
        monkeypatch.setattr(extension, "EXTENSION_LOADED", False)
        monkeypatch.setattr(extension, "CUDA_KERNELS_LOADED", False)
    return request.param
