"""The examples: short, told apart from what the device lacks in one line, and right as far as this device goes."""

import os
import runpy
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
def test_it_is_short_and_says_in_one_line_that_it_needs_a_gpu(path, monkeypatch, capfd):
    assert len(path.read_text().splitlines()) < 60
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    line = ended.value.code  # sys.exit prints it, and the process ends with 1
    assert line.startswith(path.stem) and "\n" not in line and ("GPU" in line or "not installed" in line)
    assert capfd.readouterr() == ("", "")


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


@pytest.mark.cuda
@pytest.mark.parametrize("path", EXAMPLES.glob("own_pattern_*.py"), ids=lambda path: path.stem)
def test_it_runs_on_a_gpu(path):
    finished = run([path], KFCONVERT_CACHE="off")
    assert finished.returncode == 0, finished.stderr
    assert "of the original's forward" in finished.stdout and f"own_{OWN_PATTERNS[path.stem]}: " in finished.stdout


def test_the_code_of_the_guide_runs(capsys):
    text = (EXAMPLES.parent / "docs" / "patterns.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    checks = "assert 'own_swish: ' in str(converter.explain()) and converter.conversion_stats['own_swish_found'] == 1"
    assert len(blocks) == 2
    try:
        exec("\n".join([blocks[0], checks, blocks[1]]), {"__name__": "__main__"})
    finally:
        kfconvert.unregister_pattern("own_swish")
    assert "of the original's forward" in capsys.readouterr().out
