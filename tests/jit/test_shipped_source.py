"""The CUDA source that the package ships: found by its name, with the headers that it needs."""

from pathlib import Path

import pytest

import kfconvert
from kfconvert.jit import compiler as compiling


@pytest.fixture
def jobs(monkeypatch):
    """The sources that are to be compiled, none of which is."""
    seen = []

    def compile_nothing(self, name, text, path, functions, *flags):
        seen.append(compiling.Job(name, text, path, functions, (), (), ()))

    monkeypatch.setattr(compiling.CudaCompiler, "_compile", compile_nothing)
    return seen


def test_the_shipped_source_is_found_by_its_name(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kfconvert.get_cuda_compiler().compile_from_file("softmax_cuda.cu", "my_softmax")
    (job,) = jobs
    assert job.path == Path(compiling.__file__).parent / "softmax_cuda.cu"
    names = {path.name for path in job.headers()}
    assert {"softmax.cu", "softmax.h", "rows.cuh", "host.h", "arguments.h"} <= names


def test_a_file_of_the_users_own_comes_first(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiler = kfconvert.get_cuda_compiler()
    (tmp_path / "softmax_cuda.cu").write_text("// mine")
    compiler.compile_from_file("softmax_cuda.cu", "my_softmax")
    assert jobs[0].path == tmp_path / "softmax_cuda.cu" and jobs[0].text == "// mine"
    (tmp_path / "softmax_cuda.cu").unlink()
    for missing in ("./folder/softmax_cuda.cu", tmp_path / "softmax_cuda.cu", "no.cu", "compiler.py"):
        with pytest.raises((FileNotFoundError, ValueError)):
            compiler.compile_from_file(missing, "my_softmax")
    (tmp_path / "softmax_cuda.cu").mkdir()
    with pytest.raises(FileNotFoundError):
        compiler.compile_from_file("softmax_cuda.cu", "my_softmax")
