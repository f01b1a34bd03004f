"""Compiles a CUDA source with torch's cpp_extension and ninja, caches the library on disk, and loads it.

The cache stores a library as ``<name>-<key>.so``. The key is a hash of the source, the headers that it includes from
its folder or ``extra_include_paths``, the flags (including GPU architectures), torch and Python. So a cache hit is
always valid. On a miss, the library is compiled in a temporary folder and moved atomically, under a lock that the
system releases if its holder dies.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

from . import toolchain
from .errors import CompileError, failed_build
from .job import Job, read

# Maximum length of a name: file names may have 255 bytes, and the key and the longest suffix need 30.
_LONGEST_NAME = 200
_SHIPPED = Path(__file__).parent
_NAMESPACE = re.compile(r"^[ \t]*(?:STABLE_)?TORCH_LIBRARY\([ \t]*(\w+)", re.MULTILINE)


class CudaCompiler:
    """Compiles and loads CUDA sources. Each process has one, see :func:`get_cuda_compiler`."""

    def __init__(self):
        self._lock = threading.Lock()
        self._loaded: dict[Path, Any] = {}

    def compile_from_file(
        self,
        path: str | os.PathLike,
        name: str,
        *,
        functions: str | Sequence[str] = (),
        extra_cuda_cflags: Sequence[str] = (),
        extra_ldflags: Sequence[str] = (),
        extra_include_paths: Sequence[str | os.PathLike] = (),
    ) -> Any:
        """Compiles the ``.cu`` file at ``path``, or uses the cached library, and loads it.

        See ``torch.utils.cpp_extension.load`` and ``load_inline`` for the options. A source that registers its
        operators on torch's stable ABI (``torch/csrc/stable/library.h``) compiles in seconds. With
        ``torch/extension.h``, which ``functions`` includes, compilation takes a minute or more. As with torch's
        ``load``, a registration that torch rejects, such as an invalid schema, ends the process.

        Args:
            path: the file; its folder is searched first for its includes. A bare name that is not a file in the
                working directory may name a source of this package: ``softmax_cuda.cu``.
            name: an identifier, the value of TORCH_EXTENSION_NAME in the source.
            functions: C++ functions of the source, on ``torch::Tensor``, to bind under their names.
            extra_cuda_cflags: flags of nvcc. If one of them sets an architecture, no other is added.
            extra_ldflags: flags of the linker, such as ``["-lcublas"]``.
            extra_include_paths: folders of further headers.

        Returns:
            The Python module, if there are ``functions`` or a
            ``PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)``; else ``torch.ops``, which has the operators that the
            source registers.

        Raises:
            CompileError: the source does not compile or load, nvcc, ninja or a C++ compiler is missing, or this process
                already has a TORCH_LIBRARY of the source's namespace.
            FileNotFoundError: there is no file at ``path``.
            SettingError: KFCONVERT_CUDA_ARCHS is invalid.
            TypeError: an option is not a list.
            ValueError: ``path`` does not end in ``.cu``, a name is not an identifier or too long, or a path has a
                character that ninja or nvcc do not support: a dollar sign, colon, double quote, backquote or
                backslash, or in the name of the file a space or comma.
        """
        path = _source(Path(path).expanduser())
        if not path.is_file():
            raise FileNotFoundError(f"kfconvert: there is no file {path}")
        if path.suffix != ".cu":
            raise ValueError(f"kfconvert: {path} does not end in .cu, which nvcc requires")
        if set(path.name) & {" ", ","}:
            raise ValueError(f"kfconvert: ninja and nvcc do not support a space or comma in a file name: {path.name!r}")
        flags = (extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return self._compile(name, read(path), path, functions, *flags)

    def compile_from_source(self, source: str, name: str, **options: Any) -> Any:
        """Compiles the text of a source. Errors name the file ``<name>.cu``. ``options`` are those of
        :meth:`compile_from_file`."""
        if not isinstance(source, str) or re.fullmatch(r".*\.cu", source):
            raise ValueError(f"kfconvert: {source!r} is not the text of a source: compile_from_file takes a path")
        return self._compile(name, source, None, **options)

    def _compile(self, name, text, path, functions=(), extra_cuda_cflags=(), extra_ldflags=(), extra_include_paths=()):
        functions = _strings("functions", [functions] if isinstance(functions, str) else functions)
        for identifier in (name, *functions):
            if not re.fullmatch(r"[A-Za-z_]\w*", identifier, re.ASCII):
                raise ValueError(f"kfconvert: {identifier!r} is not an identifier of letters, digits and _")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"kfconvert: the name has {len(name)} characters, at most {_LONGEST_NAME} are allowed")
        cuda_flags = _strings("extra_cuda_cflags", extra_cuda_cflags)
        link_flags = _strings("extra_ldflags", extra_ldflags)
        folders = [
            Path(folder).expanduser().absolute() for folder in _strings("extra_include_paths", extra_include_paths)
        ]
        toolchain.check_paths([path or Path(tempfile.gettempdir()), *folders])
        if torch.version.cuda is None:
            raise CompileError("kfconvert: this torch is built without CUDA: install a CUDA build of torch")
        job = Job(name, text, path, functions, toolchain.cuda_flags(cuda_flags), link_flags, tuple(folders))
        headers = job.headers()
        library = toolchain.cache_folder() / f"{name}-{job.key(headers)}.so"
        with self._lock:
            if library not in self._loaded:
                if not library.exists():
                    _build_once(job, library)
                self._loaded[library] = _load(library, name, text, headers.values())
            return self._loaded[library]


@functools.cache
def get_cuda_compiler() -> CudaCompiler:
    """Returns the compiler of this process. It also works without nvcc, for cached libraries."""
    return CudaCompiler()


def _source(path: Path) -> Path:
    """``path`` relative to the working directory, or the source of this package with this name."""
    shipped = _SHIPPED / path
    return shipped if path.name == str(path) and not path.exists() and shipped.is_file() else path.absolute()


def _strings(option: str, values: Sequence[str | os.PathLike]) -> tuple[str, ...]:
    """The option as strings. Rejects a single string, which is a sequence of characters."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(isinstance(value, (str, os.PathLike)) for value in values):
        raise TypeError(f"kfconvert: {option} must be a list of strings, not {values!r}")
    return tuple(os.fspath(value) for value in values)


def _build_once(job: Job, library: Path) -> None:
    """Compiles ``library``, unless another process has compiled it meanwhile."""
    toolchain.check()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_name(f"{job.name}.lock")):
            if not library.exists():
                _build(job, library)
    except OSError as error:
        raise CompileError(
            f"kfconvert: {error.filename or library.parent}: {error.strerror or error}; TORCH_EXTENSIONS_DIR "
            "sets another folder for compiled libraries"
        ) from error


def _build(job: Job, library: Path) -> None:
    log = library.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="kfconvert-") as name:
        folder = Path(name)
        try:
            toolchain.build(job.write_source(folder), folder, job)
        except RuntimeError as error:
            # For a text without a file, use the name only, because the folder is temporary.
            output = str(error).replace(f"{folder}{os.sep}", "")
            log.write_text(output, encoding="utf-8")
            raise failed_build(job.name, output, log) from None
        partial = library.with_suffix(".partial")
        shutil.copy2(folder / f"{job.name}.so", partial)
        os.replace(partial, library)
    log.unlink(missing_ok=True)


def _load(library: Path, name: str, text: str, headers: Iterable[str]) -> Any:
    for namespace in filter(_is_taken, _NAMESPACE.findall(text)):  # torch would end the process
        raise CompileError(
            f"kfconvert: this process already has a TORCH_LIBRARY({namespace}), and torch allows one: a "
            "changed source needs a new process"
        )
    try:
        torch.ops.load_library(str(library))
        module = _python_module(library, name)
    except (OSError, ImportError) as error:
        reason = str(error.__cause__ or error)  # the cause has the loader's message
        raise CompileError(f"kfconvert: {name} was compiled but cannot be loaded: {reason}") from error
    # Not only operators: a library may register classes, or kernels for existing operators.
    if module is None and not any("TORCH_LIBRARY" in code for code in (text, *headers)):
        raise CompileError(
            f"kfconvert: {name} has no operator and no PYBIND11_MODULE(TORCH_EXTENSION_NAME, m): register an "
            "operator with STABLE_TORCH_LIBRARY, or name the functions to bind, functions=[...]"
        )
    return torch.ops if module is None else module


def _is_taken(namespace: str) -> bool:
    """Whether this process has a TORCH_LIBRARY of that namespace."""
    try:
        # Released immediately, because the registration lives as long as the object.
        torch._C._dispatch_library("DEF", namespace, "")
    except RuntimeError:
        return True
    return False


def _python_module(library: Path, name: str) -> ModuleType | None:
    if not hasattr(ctypes.CDLL(str(library)), f"PyInit_{name}"):
        return None
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None  # the suffix is an extension module's
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
