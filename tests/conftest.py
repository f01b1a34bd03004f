"""Shared by all tests: two threads at most, one seed for each test, CUDA tests only with a GPU and its memory, heavy
ones only where KFCONVERT_HEAVY asks for them."""

import fcntl
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from kfconvert.conversion import steps


def pytest_configure(config):
    torch.set_num_threads(min(2, torch.get_num_threads()))
    steps.SECONDS_PER_MODEL = 0.05  # what a conversion gains is measured by scripts, and no test asserts it


def pytest_collection_modifyitems(items):
    missing = {}
    if not torch.cuda.is_available():
        missing["cuda"] = "torch finds no CUDA GPU"
    if not os.environ.get("KFCONVERT_HEAVY"):
        missing["heavy"] = "takes long: make check-all"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Each test times for itself, and leaves no times for others."""
    monkeypatch.setenv("KFCONVERT_CACHE", "off")


@pytest.fixture(scope="module")
def small_heap():
    """Each collection of garbage takes seconds where all that a process has loaded and tested is looked through, and
    nothing where only what is new is."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gpu_memory(request):
    """Tests marked ``gpu_memory(GiB)`` run one at a time, whatever the number of workers, and where so much is free."""
    marker = request.node.get_closest_marker("gpu_memory")
    if marker is None:
        yield
        return
    with open(Path(tempfile.gettempdir()) / "kfconvert-tests-gpu-memory.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (gib,) = marker.args
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"needs {gib} GiB of free GPU memory")
        yield
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def exact_and_repeatable_cudnn(monkeypatch):
    """TF32 would drown the errors that these tests compare, and gradcheck wants the same gradient twice."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
