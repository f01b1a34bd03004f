"""The examples: short, told apart from what the device lacks in one line, and right as far as this device goes."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kfconvert
from kfconvert import ModelConverter

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN_PATTERNS = {"own_pattern_triton": "swish", "own_pattern_cuda": "softcap"}


@pytest.fixture
def example(request, monkeypatch):
    """An example as a module."""
    if request.param == "own_pattern_triton":
        pytest.importorskip("triton")
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module(request.param)


def run(code, **environment):
    """What a process of its own prints, and how it ends."""
    path = os.pathsep.join(map(str, filter(None, (EXAMPLES.parent, EXAMPLES, os.environ.get("PYTHONPATH")))))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, env=environment)


def own_sites(stats, name):
    return [(site["status"], site["reason"]) for site in stats["sites"] if site["pattern"] == name]


@pytest.mark.parametrize("path", EXAMPLES.glob("own_pattern_*.py"), ids=lambda path: path.stem)
def test_it_is_short_and_says_in_one_line_that_it_needs_a_gpu(path):
    assert len(path.read_text().splitlines()) < 60
    finished = run([path], CUDA_VISIBLE_DEVICES="")
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == 1 and line.startswith(path.stem) and ("GPU" in line or "not installed" in line)


@pytest.mark.parametrize("example", OWN_PATTERNS, indirect=True)
def test_its_reference_is_found_in_its_model(example):
    """The reference stands for the replacement, which needs a GPU."""
    reference = getattr(example, OWN_PATTERNS[example.__name__])
    inputs = (torch.randn(2, 4),) if example.__name__ == "own_pattern_triton" else (torch.randn(2, 4), 50.0)
    kfconvert.register_pattern(reference, reference, inputs, name="own")
    try:
        converter = ModelConverter(select="all")
        converter.convert_model(example.Net(8, 8).eval(), example_inputs=torch.randn(3, 8))
        assert own_sites(converter.conversion_stats, "own") == [("applied", None)]
    finally:
        kfconvert.unregister_pattern("own")


def test_the_triton_kernel_is_right_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    code = """if True:
        import kfconvert, torch
        from own_pattern_triton import Net, swish, swish_triton
        for shape in ((3, 8), (1025,), (2, 3, 4, 5)):
            x = torch.randn(shape)
            torch.testing.assert_close(swish_triton(x), swish(x))
        kfconvert.register_pattern(swish, swish_triton, torch.randn(2, 4), name="own_swish")
        converter = kfconvert.ModelConverter(select="all")
        fused = converter.convert_model(Net(8, 8).eval(), example_inputs=torch.randn(3, 8))
        assert converter.conversion_stats["own_swish_replaced"] == 1
        kfconvert.save(fused, folder)
        try:
            kfconvert.load(folder, model=Net(8, 8))
        except kfconvert.ArtifactError as error:
            assert "own_pattern_triton:swish_triton" in str(error)
        kfconvert.load(folder, model=Net(8, 8), trust_source=True)
    """
    code = f"folder = {str(tmp_path)!r}\n{code}"
    finished = run(["-c", code], TRITON_INTERPRET="1", KFCONVERT_CACHE="off")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("path", EXAMPLES.glob("own_pattern_*.py"), ids=lambda path: path.stem)
def test_it_runs_on_a_gpu(path):
    finished = run([path], KFCONVERT_CACHE="off")
    assert finished.returncode == 0, finished.stderr
    assert "of the original's forward" in finished.stdout and f"own_{OWN_PATTERNS[path.stem]}: " in finished.stdout


def test_the_code_of_the_guide_runs():
    text = (EXAMPLES.parent / "docs" / "patterns.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    checks = "assert 'own_swish: ' in str(converter.explain()) and converter.conversion_stats['own_swish_found'] == 1"
    assert len(blocks) == 2
    finished = run(["-W", "ignore", "-c", "\n".join([blocks[0], checks, blocks[1]])], KFCONVERT_CACHE="off")
    assert finished.returncode == 0, finished.stderr
    assert "of the original's forward" in finished.stdout
