"""Compiles a CUDA source with torch's cpp_extension and ninja, caches the library on disk, and loads it.

The cache stores a library as ``<name>-<key>.so``. The key is a hash of the source, the headers that it includes from
its folder or ``extra_include_paths``, the flags (including GPU architectures), torch and Python. So a cache hit is
always valid. On a miss, the library is compiled in a temporary folder, loaded on trial by another process, and moved
atomically. This runs under a lock that the system releases if its holder dies. ``<name>-<key>.json`` has a
digest, to detect and recompile damaged libraries, and the registrations of the library.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from . import loading, toolchain
from .errors import CompileError, failed_build
from .job import Job, read
from .registrations import Registrations

# Maximum length of a name: file names may have 255 bytes, and the key and the longest suffix need 30.
_LONGEST_NAME = 200
_SHIPPED = Path(__file__).parent


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
        ``torch/extension.h``, which ``functions`` includes, compilation takes a minute or more. A new library is
        first loaded by another process, because an error in a registration may kill the process, see
        :func:`kfconvert.jit.loading.load_on_trial`.

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
            CompileError: the source does not compile or load, or nvcc, ninja or a C++ compiler is missing.
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

    def compile_from_source(
        self,
        source: str,
        name: str,
        *,
        functions: str | Sequence[str] = (),
        extra_cuda_cflags: Sequence[str] = (),
        extra_ldflags: Sequence[str] = (),
        extra_include_paths: Sequence[str | os.PathLike] = (),
    ) -> Any:
        """Compiles the text of a source, see :meth:`compile_from_file`. Errors name the file ``<name>.cu``."""
        if not isinstance(source, str) or re.fullmatch(r".*\.cu", source):
            raise ValueError(f"kfconvert: {source!r} is not the text of a source: compile_from_file takes a path")
        flags = (extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return self._compile(name, source, None, functions, *flags)

    def _compile(self, name, text, path, functions, cuda_flags, link_flags, include_paths):
        functions = _strings("functions", [functions] if isinstance(functions, str) else functions)
        for identifier in (name, *functions):
            if not re.fullmatch(r"[A-Za-z_]\w*", identifier, re.ASCII):
                raise ValueError(f"kfconvert: {identifier!r} is not an identifier of letters, digits and _")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"kfconvert: the name has {len(name)} characters, at most {_LONGEST_NAME} are allowed")
        cuda_flags = _strings("extra_cuda_cflags", cuda_flags)
        link_flags = _strings("extra_ldflags", link_flags)
        folders = [Path(folder).expanduser().absolute() for folder in _strings("extra_include_paths", include_paths)]
        toolchain.check_paths([path or Path(tempfile.gettempdir()), *folders])
        if torch.version.cuda is None:
            raise CompileError("kfconvert: this torch is built without CUDA: install a CUDA build of torch")
        job = Job(name, text, path, functions, toolchain.cuda_flags(cuda_flags), link_flags, tuple(folders))
        headers = job.headers()
        library = toolchain.cache_folder() / f"{name}-{job.key(headers)}.so"
        with self._lock:
            if library not in self._loaded:
                registrations = _kept(library) or _build_once(job, library)
                registers = any("TORCH_LIBRARY" in code for code in (text, *headers.values()))
                self._loaded[library] = _load(library, name, registrations, registers)
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


def _kept(library: Path) -> Registrations | None:
    """The registrations of ``library`` if it is cached and undamaged, else None."""
    try:
        report = json.loads(_report(library).read_text(encoding="utf-8"))
        intact = report.pop("digest", None) == _digest(library)
    except (OSError, ValueError):
        return None
    return Registrations(**report) if intact else None


def _report(library: Path) -> Path:
    return library.with_suffix(".json")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _build_once(job: Job, library: Path) -> Registrations:
    """Compiles ``library``, unless another process has compiled it meanwhile, and returns its registrations."""
    toolchain.check()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_name(f"{job.name}.lock")):
            return _kept(library) or _build(job, library)
    except OSError as error:
        raise CompileError(
            f"kfconvert: {error.filename or library.parent}: {error.strerror or error}; TORCH_EXTENSIONS_DIR "
            "sets another folder for compiled libraries"
        ) from error


def _build(job: Job, library: Path) -> Registrations:
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
        built = folder / f"{job.name}.so"
        registrations = loading.load_on_trial(built, job.name)
        report = {"digest": _digest(built), **asdict(registrations)}
        _report(built).write_text(json.dumps(report), encoding="utf-8")
        for file, place in ((_report(built), _report(library)), (built, library)):
            partial = library.with_suffix(".partial")
            shutil.copy2(file, partial)
            os.replace(partial, place)
    log.unlink(missing_ok=True)
    return registrations


def _load(library: Path, name: str, registrations: Registrations, registers: bool) -> Any:
    registrations.check()
    try:
        module = loading.load(library, name)
    except (OSError, ImportError) as error:
        raise loading.cannot_be_loaded(name, str(error.__cause__ or error)) from error
    if module is not None:
        return module
    # Not only operators: a library may register classes, or kernels for existing operators.
    if not registers and not registrations.operators:
        raise CompileError(
            f"kfconvert: {name} has no operator and no PYBIND11_MODULE(TORCH_EXTENSION_NAME, m): register an "
            "operator with STABLE_TORCH_LIBRARY, or name the functions to bind, functions=[...]"
        )
    return torch.ops
