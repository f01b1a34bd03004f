"""What `python -m build` makes: the sdist builds by itself, and its wheel works where nothing of this tree is."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Converts a model, and looks which files the CUDA source that the package ships would include.
CODE = """
import json
import pathlib

import torch

import kfconvert
from kfconvert.jit import compiler

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
fused = kfconvert.auto_convert_model(model, (2, 8), select="all")
with torch.no_grad():
    torch.testing.assert_close(fused(torch.ones(2, 8)), model(torch.ones(2, 8)))
source = pathlib.Path(compiler.__file__).parent / "softmax_cuda.cu"
job = compiler.Job("softmax", source.read_text(), source, (), (), (), ())
print(json.dumps({
    "package": kfconvert.__file__,
    "kernels": kfconvert.EXTENSION_LOADED,
    "replaced": fused.kfconvert_info()["total_replaced"],
    "headers": sorted(path.name for path in job.headers()),
}))
"""


def run(*command, folder):
    """Its stdout; the tree is not on its path, and it remembers no times."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"KFCONVERT_CACHE": "off", "KFCONVERT_NO_CUDA": "1"}
    command = [str(word) for word in command]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished.stdout


def build(kind, source, out):
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source, folder=out)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def bare_environment(folder, wheel):
    """One that has the wheel, and what that needs from where torch lies, but not the kfconvert installed there."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    dependencies = Path(importlib.util.find_spec("torch").origin).parents[1]
    Path(packages.strip(), "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin"


@pytest.mark.heavy
def test_the_wheel_of_the_sdist_converts_where_nothing_else_is(tmp_path):
    for name in ("dist", "source", "empty"):
        (tmp_path / name).mkdir()
    sdist = build("sdist", ROOT, tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    if (ROOT / ".git").exists():
        tracked = run("git", "ls-files", folder=ROOT).splitlines()
        assert [name for name in tracked if not (source / name).exists()] == []

    wheel = build("wheel", source, tmp_path / "dist")
    names = zipfile.ZipFile(wheel).namelist()
    files = [path for path in (source / "kfconvert").rglob("*") if path.is_file()]
    assert [path for path in files if path.relative_to(source).as_posix() not in names] == []
    assert "kfconvert/_ops_cpu.so" in names and any(name.startswith("kfconvert/_C.") for name in names)

    bin_folder = bare_environment(tmp_path / "bare", wheel)
    doctor = run(bin_folder / "kfconvert", "doctor", folder=tmp_path / "empty")
    assert "ok  CPU kernels: loaded" in doctor and "ok  compiled guard" in doctor
    facts = json.loads(run(bin_folder / "python", "-W", "ignore", "-c", CODE, folder=tmp_path / "empty"))
    assert Path(facts["package"]).is_relative_to(tmp_path / "bare")
    assert facts["kernels"] and facts["replaced"] == 1
    assert {"softmax.cu", "softmax.h", "rows.cuh", "host.h", "arguments.h"} <= set(facts["headers"])
    assert list((tmp_path / "empty").iterdir()) == []

    options = ["--input-shape", "1,3,64,64", "--weights", "random", "--effort", "fast", "--save-path", "out"]
    run(bin_folder / "kfconvert", "--models", "squeezenet1_1", *options, folder=tmp_path / "empty")
    saved = tmp_path / "empty" / "out" / "squeezenet1_1"
    assert {"kfconvert.json", "model.safetensors", "report.html"} <= {path.name for path in saved.iterdir()}
