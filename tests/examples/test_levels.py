"""The lessons: all levels compute the same, those that cannot run are named, and nothing stops the rest."""

import dataclasses
import os
import subprocess
import sys

import levels
import pytest
import torch
from levels import definition, measuring
from torch import Tensor

from kfconvert import extension
from kfconvert.accuracy import Reference, compare
from kfconvert.inputs import ExampleCall
from kfconvert.profiling import measurement

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="the CPU kernels are not built")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Times are not looked at here."""
    monkeypatch.setattr(measuring, "WARMUP", 0)
    monkeypatch.setattr(measuring, "REPEAT", 2)
    monkeypatch.setattr(measurement, "copy_bandwidth", lambda device: 10.0)


@pytest.fixture
def not_compiled(monkeypatch):
    """What torch.compile makes takes seconds, and one test has it."""
    monkeypatch.setattr(definition, "_no_code", lambda device: "not in this test")


def outcomes(result):
    return {level.name: level.missing or level.problem or "ran" for level in result.levels}


@needs_kernels
@pytest.mark.parametrize("name", levels.NAMES)
def test_levels_agree_with_float64_and_those_that_cannot_run_are_named(name, not_compiled):
    result = levels.run(name)
    found = outcomes(result)
    assert found.pop("Triton") == "Triton needs a CUDA device"
    assert found.pop("CUDA") == "CUDA kernels need a CUDA device"
    assert found.pop("torch.compile") == "not in this test"
    assert set(found.values()) == {"ran"} and {"PyTorch native", "TorchScript", "C++"} <= set(found)
    ran = {level.name: level for level in result.levels if level.measurement}
    assert ran["PyTorch native"].speedup is None and ran["C++"].speedup is not None
    assert all(level.error < 1e-5 and level.measurement.bytes_moved > 0 for level in ran.values())


@pytest.mark.exhaustive
def test_torch_compile_is_a_level():
    result = levels.run("add_mul_exp")
    if definition._no_code(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    assert outcomes(result)["torch.compile"] == "ran"


def test_without_a_compiler_torch_compile_is_named(monkeypatch):
    monkeypatch.setattr(definition.shutil, "which", lambda name: None)
    assert outcomes(levels.run("add_mul_exp"))["torch.compile"] == "torch.compile needs a C++ compiler on the CPU"


@pytest.mark.cuda
@pytest.mark.parametrize("name", levels.NAMES)
def test_every_level_runs_on_cuda(name):
    result = levels.run(name, "cuda")
    assert set(outcomes(result).values()) == {"ran"}
    assert "C++" not in outcomes(result)
    assert all(level.measurement.launches for level in result.levels)


def raising(*_: Tensor) -> Tensor:
    raise RuntimeError("not today\nnor tomorrow")


def wrong(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp((x + y) * 2.0) + 0.01


def with_a_kernel(monkeypatch, name, kernel):
    """The lesson ``name`` with another kernel in the place of this package's."""
    lesson = dataclasses.replace(levels.lesson(name), kernel=lambda family: kernel)
    monkeypatch.setattr(measuring, "lesson", lambda _: lesson)


@needs_kernels
def test_a_level_that_fails_or_is_wrong_is_told_and_not_timed(monkeypatch, not_compiled):
    with_a_kernel(monkeypatch, "add_mul_exp", raising)
    result = levels.run("add_mul_exp")
    assert outcomes(result)["C++"] == "failed: RuntimeError: not today"
    assert outcomes(result)["PyTorch native"] == "ran"
    with_a_kernel(monkeypatch, "add_mul_exp", wrong)
    (problem,) = levels.run("add_mul_exp").problems
    assert problem.startswith("add_mul_exp, C++: output has error") and "against the float64 run" in problem


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="no lesson 'addition': there are add_mul_exp, "):
        levels.run("addition")
    with pytest.raises(ValueError, match="no size 'huge': there are small and full"):
        levels.run("add_mul_exp", size="huge")


@pytest.mark.parametrize("size", levels.SIZES)
@pytest.mark.parametrize("name", levels.NAMES)
def test_both_sizes_have_inputs_for_the_native_level(name, size):
    with torch.device("meta"):
        args = levels.lesson(name).inputs(torch.randn, **levels.lesson(name).sizes[size])
        assert levels.lesson(name).native(*args).numel() > 0


def test_without_compiled_kernels_their_level_is_named(monkeypatch, not_compiled):
    monkeypatch.setitem(extension.load_errors, "cpu", "not built")
    assert outcomes(levels.run("add_mul_exp"))["C++"] == "not built"


if INTERPRETED:

    @pytest.mark.parametrize(
        ("name", "sizes"),
        [
            ("add_mul_exp", {"elements": 1000}),
            ("layer_norm", {"rows": 5, "width": 96}),
            ("linear_gelu", {"rows": 70, "features": 40, "results": 72}),
            ("attention", {"batch": 2, "heads": 2, "length": 70, "width": 16}),
            ("transformer_block", {"batch": 2, "length": 9, "width": 32, "heads": 2}),
        ],
    )
    def test_triton_levels_in_the_interpreter(name, sizes):
        lesson = levels.lesson(name)
        args = lesson.inputs(torch.randn, **sizes)
        truth = Reference(lesson.native(*ExampleCall(args).map_tensors(Tensor.double).args), "float64 run")
        with torch.no_grad():
            verdict = compare(truth, lesson.native(*args), lesson.triton()(*args), measuring.TOLERANCE)
        assert verdict.passed, verdict.reason

else:

    def test_in_the_interpreter():
        """It must be chosen before Triton is imported, so this file runs again in a process of its own."""
        pytest.importorskip("triton")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter", __file__]
        run = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout[-5000:]
        assert "5 passed" in run.stdout
