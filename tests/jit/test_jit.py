"""CUDA sources of the user's own: compiled, cached and loaded, and what is said where that fails."""

import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from support.selection import each_once
from torch.utils import cpp_extension

import kfconvert
from kfconvert import CompileError
from kfconvert.jit import compiler as compiling
from kfconvert.jit import toolchain
from kfconvert.settings import SettingError

ROOT = Path(__file__).parents[2]
LOAD = compiling._load

OPERATOR = """
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include "factor.h"

using torch::stable::Tensor;

__global__ void scale_kernel(float* x, int64_t n) {
  const int64_t i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}

void scale_(const Tensor x) {
  void* stream = nullptr;
  const auto found = aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  STD_TORCH_CHECK(found == AOTI_TORCH_SUCCESS, "no current stream");
  const int64_t n = x.numel();
  scale_kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<float*>(x.data_ptr()), n);
}

STABLE_TORCH_LIBRARY(jit_test, m) { m.def("scale_(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(jit_test, CUDA, m) { m.impl("scale_", TORCH_BOX(&scale_)); }
"""

# Without any header of torch, so that it compiles in no time.
MODULE = """
#include <Python.h>
__global__ void kernel(float* x) { *x = ANSWER; }
static PyModuleDef definition{PyModuleDef_HEAD_INIT, "answer"};
PyMODINIT_FUNC PyInit_answer() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "value", ANSWER);
  return module;
}
"""


def missing_tool() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        toolchain.check()
    except CompileError as error:
        return str(error)
    return None


MISSING = missing_tool()
compiles = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
pytestmark = pytest.mark.filterwarnings("ignore:kfconvert. torch finds no CUDA GPU")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An empty cache, and one architecture where there is no GPU that decides: each costs compile time."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        if not torch.cuda.is_available():
            patch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        yield folder / "kfconvert"


@pytest.fixture(scope="module")
def operator(cache, tmp_path_factory):
    """The file of OPERATOR, compiled and loaded."""
    folder = tmp_path_factory.mktemp("my sources")
    (folder / "factor.h").write_text("#define FACTOR 2\n")
    (folder / "operator.cu").write_text(OPERATOR)
    assert kfconvert.get_cuda_compiler().compile_from_file(folder / "operator.cu", "scaling") is torch.ops
    return folder / "operator.cu"


@pytest.fixture
def never_compiles(monkeypatch):
    def build(*_):
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(toolchain, "build", build)


def python(code: str, *arguments) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@compiles
def test_operator_of_a_file(operator, never_compiles):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("jit_test::scale_", "CUDA")
    again = kfconvert.get_cuda_compiler().compile_from_file(str(operator), "scaling")
    assert again.jit_test.scale_ is torch.ops.jit_test.scale_


IN_ANOTHER_PROCESS = """
import sys, torch, kfconvert
from kfconvert.jit import toolchain
class Compiled(Exception): pass
def build(*_): raise Compiled
toolchain.build = build
for path in sys.argv[:0:-1]:
    try:
        kfconvert.get_cuda_compiler().compile_from_file(path, "scaling")
        print(torch._C._dispatch_has_kernel_for_dispatch_key("jit_test::scale_", "CUDA"))
    except Compiled:
        print("compiled")
"""


@compiles
def test_another_process_compiles_only_what_changed(operator, tmp_path):
    (tmp_path / "operator.cu").write_text(OPERATOR)
    (tmp_path / "factor.h").write_text("#define FACTOR 3\n")
    assert python(IN_ANOTHER_PROCESS, operator, tmp_path / "operator.cu").split() == ["compiled", "True"]


@compiles
def test_operators_cannot_be_registered_twice(operator, slow_builds, monkeypatch):
    # torch would end the process.
    monkeypatch.setattr(compiling, "_load", LOAD)
    text = "  STABLE_TORCH_LIBRARY(jit_test, m) {}"
    for _ in range(2):
        with pytest.raises(CompileError, match=r"already has a TORCH_LIBRARY\(jit_test\).*needs a new process"):
            kfconvert.get_cuda_compiler().compile_from_source(text, "registers_again")


@compiles
@pytest.mark.exhaustive
def test_a_changed_source_of_a_module(cache, monkeypatch):
    compiler = kfconvert.get_cuda_compiler()
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("Killed")))
        with pytest.raises(CompileError, match="^kfconvert: answer did not compile: Killed\n") as caught:
            compiler.compile_from_source(MODULE, "answer", extra_cuda_cflags=["-DANSWER=42"])
    assert caught.value.errors == [] and caught.value.log.read_text() == "Killed"
    # A failed build is tried again, and its log goes.
    first = compiler.compile_from_source(MODULE, "answer", extra_cuda_cflags=["-DANSWER=42"])
    second = compiler.compile_from_source(MODULE.replace("ANSWER", "43"), "answer")
    assert (first.__name__, first.value, second.value) == ("answer", 42, 43)
    assert {path.suffix for path in cache.glob("answer*")} == {".so", ".lock"}


@compiles
def test_compiler_errors(cache, tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text("// kernels\n__global__ void k(float* x) { x[0] = y; }\nint f() { return nowhere; }\n")
    with pytest.raises(CompileError) as caught:
        kfconvert.get_cuda_compiler().compile_from_file(path, "wrong")
    error = caught.value
    first = f'{path}:2: error: identifier "y" is undefined'
    second = f'{path}:3: error: identifier "nowhere" is undefined'
    assert error.errors == [first, second]
    assert str(error).splitlines() == [first, second, f"kfconvert: wrong did not compile; full output: {error.log}"]
    assert "-gencode" in error.log.read_text()


@compiles
@pytest.mark.exhaustive
def test_what_cannot_be_loaded(cache):
    compile_source = kfconvert.get_cuda_compiler().compile_from_source
    with pytest.raises(CompileError, match="^kfconvert: lost was compiled but cannot be loaded: .*_Z7now"):
        compile_source("void nowhere(); void f() { nowhere(); }", "lost")
    with pytest.raises(CompileError, match="^kfconvert: idle has no operator and no PYBIND11_MODULE"):
        compile_source("__global__ void k() {}", "idle")


@compiles
@pytest.mark.exhaustive
def test_example(cache, capsys):
    runpy.run_path(str(ROOT / "scripts" / "example_operator.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "traced with fake tensors on a GPU: (8, 128)" in printed
    assert "cpu: values, gradcheck and opcheck passed" in printed
    on_gpu = "cuda: values, gradcheck and opcheck passed"
    nowhere = "cuda: torch finds no GPU, the kernels were NOT run"
    assert (on_gpu if torch.cuda.is_available() else nowhere) in printed


@compiles
@pytest.mark.cuda
def test_operator_on_the_gpu(operator):
    x = torch.randn(1000, device="cuda")
    expected = 2 * x
    torch.ops.jit_test.scale_(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.fixture
def slow_builds(cache, monkeypatch):
    """Builds that take a while and make an empty file, and loading that gives its path; the names built."""
    built = []

    def build(source, folder, job):
        built.append(job.name)
        time.sleep(0.05)
        (folder / f"{job.name}.so").touch()

    monkeypatch.setattr(toolchain, "check", lambda: None)
    monkeypatch.setattr(toolchain, "build", build)
    monkeypatch.setattr(compiling, "_load", lambda library, *_: library)
    return built


@needs_cuda_build
def test_compilers_at_the_same_time(slow_builds):
    # Two compilers stand for two processes: the lock is held by whoever opened the file.
    paths = []

    def compile_it():
        paths.append(compiling.CudaCompiler().compile_from_source("1", "both"))

    threads = [threading.Thread(target=compile_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow_builds == ["both"] and len(paths) == 2 and paths[0] == paths[1]


@needs_cuda_build
def test_after_a_builder_was_killed(cache, slow_builds):
    cache.mkdir(exist_ok=True)
    (cache / "killed.lock").touch()
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=1); time.sleep(9)"
    command = [sys.executable, "-c", code, str(cache / "killed.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        threading.Timer(0.3, holder.kill).start()
        library = compiling.CudaCompiler().compile_from_source("1", "killed")
    assert library.exists() and slow_builds == ["killed"]


@needs_cuda_build
def test_what_a_library_depends_on(slow_builds, tmp_path, monkeypatch):
    source = tmp_path / "a.cu"
    source.write_text('#include "inc/b.h"\n')
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "b.h").write_text('#  include <c.h>\n#include "../inc/b.h"\n')
    (tmp_path / "inc" / "c.h").write_text("1")

    def compile_it(**options):
        return compiling.CudaCompiler().compile_from_file(source, "depends", **options)

    libraries = [compile_it(), compile_it(functions="f"), compile_it(extra_cuda_cflags=["-DX"])]
    libraries += [compile_it(extra_ldflags=["-lm"]), compile_it(extra_include_paths=[tmp_path / "nothing"])]
    (tmp_path / "inc" / "c.h").write_text("2")
    libraries.append(compile_it())
    source.write_text(source.read_text() + "\n")
    libraries.append(compile_it())
    monkeypatch.setattr(torch, "__version__", "2.99")
    libraries.append(compile_it())
    assert len(set(libraries)) == len(libraries) == len(slow_builds)
    assert compile_it() == libraries[-1] and len(slow_builds) == len(libraries)


@needs_cuda_build
def test_functions_are_bound_beside_the_source(tmp_path):
    job = compiling.Job("pair", "text", None, ("add", "mul"), (), (), ())
    bindings = job.write_source(tmp_path)
    assert (tmp_path / "pair.cu").read_text() == "text"
    assert bindings.read_text().splitlines() == [
        "#include <torch/extension.h>",
        f'#include "{tmp_path / "pair.cu"}"',
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {",
        '  m.def("add", torch::wrap_pybind_function(add));',
        '  m.def("mul", torch::wrap_pybind_function(mul));',
        "}",
    ]


def test_inputs_that_make_no_sense(tmp_path):
    compiler = kfconvert.get_cuda_compiler()
    with pytest.raises(ValueError, match="^kfconvert: 'a-b' is not an identifier of letters, digits and _$"):
        compiler.compile_from_source("", "a-b")
    with pytest.raises(ValueError, match="^kfconvert: 'f()' is not an identifier".replace("()", r"\(\)")):
        compiler.compile_from_source("", "a", functions=["f()"])
    with pytest.raises(FileNotFoundError, match=f"^kfconvert: there is no file {tmp_path}/a.cu$"):
        compiler.compile_from_file(tmp_path / "a.cu", "a")
    (tmp_path / "a.cpp").touch()
    with pytest.raises(ValueError, match=r"a\.cpp does not end in \.cu, which nvcc requires$"):
        compiler.compile_from_file(tmp_path / "a.cpp", "a")
    with pytest.raises(ValueError, match="^kfconvert: the name has 201 characters, at most 200 are allowed$"):
        compiler.compile_from_source("", "a" * 201)
    for source in ("my/a.cu", tmp_path / "a.cu"):
        with pytest.raises(ValueError, match="a.cu.* is not the text of a source: compile_from_file takes a path$"):
            compiler.compile_from_source(source, "a")


@each_once(option=["extra_cuda_cflags", "extra_ldflags", "extra_include_paths"], value=["-O2", Path("src"), None, [3]])
def test_options_are_lists(option, value):
    with pytest.raises(TypeError, match=f"^kfconvert: {option} must be a list of strings, not .*[^\n]$"):
        kfconvert.get_cuda_compiler().compile_from_source("", "a", **{option: value})


@pytest.mark.parametrize("character", '$:"`')
def test_paths_that_ninja_or_nvcc_would_read_otherwise(character, tmp_path, monkeypatch):
    compiler = kfconvert.get_cuda_compiler()
    folder = tmp_path / f"a{character}b"
    folder.mkdir()
    (folder / "a.cu").touch()
    message = f"^kfconvert: ninja and nvcc do not support '[{character}]' in a path: '{tmp_path}/a[{character}]b"
    with pytest.raises(ValueError, match=message):
        compiler.compile_from_file(folder / "a.cu", "a")
    with pytest.raises(ValueError, match=message):
        compiler.compile_from_source("", "a", extra_include_paths=[folder])
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ValueError, match=message):
        compiler.compile_from_source("", "a")


def test_names_of_files_that_ninja_or_nvcc_would_split(tmp_path):
    (tmp_path / "my file.cu").touch()
    with pytest.raises(ValueError, match="do not support a space or comma in a file name: 'my file.cu'$"):
        kfconvert.get_cuda_compiler().compile_from_file(tmp_path / "my file.cu", "a")


def test_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CompileError, match="^kfconvert: this torch is built without CUDA: "):
        kfconvert.get_cuda_compiler().compile_from_source("", "a")


@needs_cuda_build
def test_tools_that_are_missing(cache, monkeypatch, tmp_path):
    def message():
        with pytest.raises(CompileError) as caught:
            kfconvert.get_cuda_compiler().compile_from_source("tools", "a")
        return str(caught.value)

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert message() == "kfconvert: nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to it"
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    assert message().startswith("kfconvert: nvcc was not found")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert message() == "kfconvert: C++ compiler 'no-such-compiler' was not found: install one, or set CXX"
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(toolchain, "_ninja", lambda: None)
    assert message() == "kfconvert: ninja was not found: pip install ninja"


@needs_cuda_build
def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(toolchain, "check", lambda: None)
    with pytest.raises(CompileError, match="/file/kfconvert: Not a directory; TORCH_EXTENSIONS_DIR sets "):
        kfconvert.get_cuda_compiler().compile_from_source("", "a")


@needs_cuda_build
def test_architectures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("TORCH_CUDA_ARCH_LIST", "KFCONVERT_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)

    def targets(*extra):
        return [flag.rpartition("code=")[2] for flag in toolchain.cuda_flags(extra) if "gencode" in flag]

    with pytest.warns(RuntimeWarning, match="no CUDA GPU, so kfconvert compiles for compute capability 8.0 and 9.0, "):
        assert targets() == ["sm_80", "sm_90", "compute_90"]
    assert targets("-arch=sm_75") == []
    monkeypatch.setenv("KFCONVERT_CUDA_ARCHS", "8.6")
    assert targets() == ["sm_86", "compute_86"]
    monkeypatch.setenv("KFCONVERT_CUDA_ARCHS", "Hopper")
    with pytest.raises(SettingError, match="^KFCONVERT_CUDA_ARCHS must be like \"8.0 9.0\", not 'Hopper'$"):
        targets()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    assert targets() == ["compute_90", "sm_90"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.7")
    with pytest.raises(CompileError, match=r"^kfconvert: TORCH_CUDA_ARCH_LIST: Unknown CUDA arch \(9.7\)"):
        targets()


def test_optimization_flag():
    assert "-O3" in toolchain.cuda_flags(["-arch=sm_90"])
    assert "-O3" not in toolchain.cuda_flags(["-arch=sm_90", "-O1"])
