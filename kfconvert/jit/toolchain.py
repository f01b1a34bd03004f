"""nvcc, ninja and their flags, through torch.utils.cpp_extension.

``load`` is not used: it compiles and loads in one step, and does not retry a failed build in a process. In some
versions of torch it waits forever for the lock of a killed process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils import cpp_extension

from .. import settings
from .errors import CompileError
from .job import Job

_SETS_ARCH = re.compile("--?(arch|gencode|generate-code|gpu-)")
_NOT_IN_PATHS = re.compile(r'[$:"`\\\n]')


def cache_folder() -> Path:
    """Returns the folder of compiled libraries, in the folder of torch's ``load``."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root).expanduser().absolute() / "kfconvert"


def cuda_flags(extra: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags of nvcc in addition to torch's."""
    optimize = [] if any(flag.startswith(("-O", "--optimize")) for flag in extra) else ["-O3"]
    archs = [] if any(_SETS_ARCH.match(flag) for flag in extra) else _arch_flags()
    # USE_CUDA: the stable ABI only has the current stream with it.
    return ("-DUSE_CUDA", *optimize, *archs, *extra)


def _arch_flags() -> list[str]:
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST") not in (None, "", "native")
    if chosen or torch.cuda.is_available():
        try:
            return cpp_extension._get_cuda_arch_flags()
        except ValueError as error:
            raise CompileError(f"kfconvert: TORCH_CUDA_ARCH_LIST: {error}") from None
    archs = settings.cuda_archs()
    if not os.environ.get("KFCONVERT_CUDA_ARCHS"):
        named = " and ".join(f"{arch[:-1]}.{arch[-1]}" for arch in archs)
        warnings.warn(
            f"kfconvert: torch finds no CUDA GPU, so kfconvert compiles for compute capability {named}, unless "
            "TORCH_CUDA_ARCH_LIST is set",
            RuntimeWarning,
            stacklevel=5,  # the caller of compile_from_file
        )
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def _nvcc() -> Path | None:
    nvcc = Path(cpp_extension.CUDA_HOME, "bin", "nvcc") if cpp_extension.CUDA_HOME else None
    return nvcc if nvcc and nvcc.exists() else None


def check() -> None:
    """Raises a one-line CompileError for the first missing tool."""
    if _nvcc() is None:
        raise CompileError("kfconvert: nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to it")
    compiler = shlex.split(cpp_extension.get_cxx_compiler())[0]
    if shutil.which(compiler) is None:
        raise CompileError(f"kfconvert: C++ compiler {compiler!r} was not found: install one, or set CXX")
    if _ninja() is None:
        raise CompileError("kfconvert: ninja was not found: pip install ninja")


def check_paths(paths: Iterable[Path]) -> None:
    """Raises a one-line ValueError for the first path that ninja or nvcc, which expands it, does not support."""
    for path in paths:
        if found := _NOT_IN_PATHS.search(str(path)):
            raise ValueError(f"kfconvert: ninja and nvcc do not support {found[0]!r} in a path: {str(path)!r}")


def _ninja() -> str | None:
    return shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Context manager that adds ninja to PATH, which lacks it if the virtual environment is not activated."""
    before, ninja = os.environ["PATH"], _ninja()
    assert ninja is not None  # see check
    os.environ["PATH"] = os.pathsep.join([before, os.path.dirname(ninja)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def build(source: Path, folder: Path, job: Job) -> None:
    """Compiles ``source`` to ``folder``/<job.name>.so.

    Raises:
        RuntimeError: the compiler failed; the message has its full output.
    """
    with _ninja_on_path():
        cpp_extension._write_ninja_file_and_build_library(
            name=job.name,
            sources=[str(source)],
            extra_cflags=[],
            extra_cuda_cflags=[*_wheel_headers(), *job.cuda_flags],
            extra_sycl_cflags=[],
            extra_ldflags=[*_library_paths(), *job.link_flags],
            extra_include_paths=[str(path) for path in job.include_paths],
            build_directory=str(folder),
            verbose=False,
            with_cuda=True,
            with_sycl=False,
        )


def _wheel_headers() -> list[str]:
    """The include folders of the CUDA packages of torch's wheel, for headers that the toolkit lacks."""
    spec = find_spec("nvidia")
    folders = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    includes = sorted(include for folder in folders for include in folder.glob("*/include"))
    return [flag for path in includes for flag in ("-Xcompiler", shlex.quote(f"-idirafter,{path}"))]


def _library_paths() -> list[str]:
    """The folders in which nvcc finds libcudart. torch guesses from the path of nvcc, which may be a wrapper."""
    command = [str(_nvcc()), "--dryrun", "-x", "cu", "-c", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (line for line in done.stderr.splitlines() if line.startswith("#$ LIBRARIES="))
    return [shlex.quote(flag) for line in lines for flag in shlex.split(line.partition("=")[2])]
