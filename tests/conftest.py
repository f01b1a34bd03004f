"""Shared by all tests: two threads at most, one seed for each test, CUDA tests only with a GPU and its memory, heavy
ones only where KFCONVERT_HEAVY asks for them, exhaustive ones only with ``--exhaustive``."""

import dataclasses
import fcntl
import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch
from support import selection

from kfconvert.conversion import effort, selector, timing


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="whole products of parameters, and exhaustive tests")


def pytest_configure(config):
    selection.EXHAUSTIVE = config.getoption("exhaustive")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    # Scripts measure what a conversion gains, and no test asserts it. ``setattr`` fails if a setting has moved.
    patch = pytest.MonkeyPatch()
    patch.setattr(timing, "SECONDS_PER_MODEL", 0.01)
    patch.setattr(selector, "SECONDS_PER_LAYOUT", 0.02)
    patch.setattr(selector, "SECONDS_PER_CALL_FORM", 0.03)
    # TorchInductor takes seconds for each model: tests of generated kernels ask for them.
    full = dataclasses.replace(effort.EFFORTS["full"], generates_kernels=False)
    patch.setitem(effort.EFFORTS, "full", full)


def pytest_collection_modifyitems(config, items):
    """Leaves out what cannot run here and what a short run does not need; names a reason for each heavy test."""
    absent = set()
    if not torch.cuda.is_available():
        absent.add("cuda")
    if not selection.EXHAUSTIVE:
        absent.add("exhaustive")
    left_out = [item for item in items if any(map(item.get_closest_marker, absent))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not any(map(item.get_closest_marker, absent))]
    for item in items:
        if item.get_closest_marker("heavy") and not os.environ.get("KFCONVERT_HEAVY"):
            item.add_marker(pytest.mark.skip(reason="takes long: make check-all"))


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Each test times for itself, and leaves no times for others."""
    monkeypatch.setenv("KFCONVERT_CACHE", "off")


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Each conversion collects garbage, which takes a second if the collector searches all that the process has loaded.

    It never searches again what was alive when a file of tests began.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    """As ``torch.manual_seed(0)``, which formats a stack for each kind of accelerator that is not there."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


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
