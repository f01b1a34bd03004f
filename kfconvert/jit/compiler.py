"""Compiles a CUDA source with torch's cpp_extension and ninja, keeps the library on disk, and loads it.

A library lies in the cache as ``<name>-<key>.so``. The key is made of what goes into it: the source, the
headers that it includes from its own folder or ``extra_include_paths``, the flags (which name the GPU
architectures), torch and Python. So a file that is there is right. One that is not is compiled in a temporary
folder and moved to its place in one step, under a lock that the system frees when its holder dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import toolchain
from .errors import CompileError, failed_build
from .registrations import check_registrations, without_comments

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One library to be compiled: ``path`` is the user's file, or None where ``text`` is all there is."""

    name: str
    text: str
    path: Path | None
    functions: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    include_paths: tuple[Path, ...]

    def headers(self) -> dict[Path, str]:
        """The text of each header that the source includes from folders of the user's, directly or not."""
        found: dict[Path, str] = {}
        pending = [(self.text, self.path)]
        while pending:
            text, source = pending.pop()
            folders = (source.parent, *self.include_paths) if source else self.include_paths
            for include in _INCLUDE.findall(text):
                candidates = ((folder / include).resolve() for folder in folders)
                header = next((path for path in candidates if path.is_file()), None)
                if header and header not in found:
                    found[header] = _read(header)
                    pending.append((found[header], header))
        return found

    def key(self, headers: dict[Path, str]) -> str:
        facts = [
            self.text,
            sorted((path.name, text) for path, text in headers.items()),
            [self.functions, self.cuda_flags, self.link_flags, [str(path) for path in self.include_paths]],
            [torch.__version__, torch.version.cuda, sys.implementation.cache_tag],
            [os.environ.get(variable) for variable in ("CC", "CXX", "PYTORCH_NVCC")],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def write_source(self, folder: Path) -> Path:
        """The file to be compiled: the user's own where it can be, so that errors name it."""
        source = self.path
        if source is None:
            source = folder / f"{self.name}.cu"
            source.write_text(self.text, encoding="utf-8")
        if not self.functions:
            return source
        # Includes the source instead of continuing it, so that line numbers stay right.
        lines = [
            "#include <torch/extension.h>",
            f'#include "{source}"',
            "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {",
            *(f'  m.def("{name}", torch::wrap_pybind_function({name}));' for name in self.functions),
            "}\n",
        ]
        bindings = folder / "bindings.cu"
        bindings.write_text("\n".join(lines), encoding="utf-8")
        return bindings


class CudaCompiler:
    """Compiles and loads CUDA sources; one for each process, from :func:`get_cuda_compiler`."""

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
        """Compiles the ``.cu`` file at ``path``, or takes the library from the cache, and loads it.

        The options are those of ``torch.utils.cpp_extension.load`` and ``load_inline``. A source that
        registers its operators on torch's stable ABI (``torch/csrc/stable/library.h``) compiles in seconds;
        one that includes ``torch/extension.h``, as ``functions`` does for it, takes a minute or more.

        Args:
            path: the file; its own includes are looked up beside it first.
            name: an identifier, what TORCH_EXTENSION_NAME stands for in the source.
            functions: C++ functions of the source, on ``torch::Tensor``, to be bound under their names.
            extra_cuda_cflags: for nvcc; where one of them sets an architecture, no other is added.
            extra_ldflags: for the linker, like ``["-lcublas"]``.
            extra_include_paths: folders of further headers.

        Returns:
            The Python module, where there are ``functions`` or a
            ``PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)``; else ``torch.ops``, which has the operators that the
            source registers.

        Raises:
            CompileError: it does not compile or load, or nvcc, ninja or a C++ compiler is missing.
            FileNotFoundError: there is no file at ``path``.
            SettingError: KFCONVERT_CUDA_ARCHS makes no sense.
            ValueError: ``path`` does not end in ``.cu``, or a name is no identifier.
        """
        path = Path(path).expanduser().absolute()
        if not path.is_file():
            raise FileNotFoundError(f"kfconvert: there is no file {path}")
        if path.suffix != ".cu":
            raise ValueError(f"kfconvert: {path} does not end in .cu, and nvcc goes by that")
        flags = (extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return self._compile(name, _read(path), path, functions, *flags)

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
        """:meth:`compile_from_file` for the text of a source; its errors name it ``<name>.cu``."""
        flags = (extra_cuda_cflags, extra_ldflags, extra_include_paths)
        return self._compile(name, source, None, functions, *flags)

    def _compile(self, name, text, path, functions, cuda_flags, link_flags, include_paths):
        functions = (functions,) if isinstance(functions, str) else tuple(functions)
        for identifier in (name, *functions):
            if not re.fullmatch(r"[A-Za-z_]\w*", identifier, re.ASCII):
                raise ValueError(f"kfconvert: {identifier!r} is no identifier of letters, digits and _")
        if torch.version.cuda is None:
            raise CompileError("kfconvert: this torch is built without CUDA: install one that has it")
        job = Job(
            name,
            text,
            path,
            functions,
            toolchain.cuda_flags(cuda_flags),
            tuple(link_flags),
            tuple(Path(folder).expanduser().absolute() for folder in include_paths),
        )
        headers = job.headers()
        library = toolchain.cache_folder() / f"{name}-{job.key(headers)}.so"
        code = without_comments("\n".join([text, *headers.values()]))
        with self._lock:
            if library not in self._loaded:
                check_registrations(code, name)
                if not library.exists():
                    _build_once(job, library)
                self._loaded[library] = _load(library, name, registers="TORCH_LIBRARY" in code)
            return self._loaded[library]


@functools.cache
def get_cuda_compiler() -> CudaCompiler:
    """The compiler of this process. It is there without nvcc as well: what is in the cache can be loaded."""
    return CudaCompiler()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _build_once(job: Job, library: Path) -> None:
    """Compiles ``library``, unless another process does so meanwhile."""
    toolchain.check()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_name(f"{job.name}.lock")):
            if not library.exists():
                _build(job, library)
    except OSError as error:
        raise CompileError(
            f"kfconvert: {error.filename or library.parent}: {error.strerror or error}; TORCH_EXTENSIONS_DIR "
            "sets another folder for compiled libraries"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(job: Job, library: Path) -> None:
    log = library.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="kfconvert-") as name:
        folder = Path(name)
        try:
            toolchain.build(job.write_source(folder), folder, job)
        except RuntimeError as error:
            # Where the text came without a file its name is enough: the folder is about to go.
            output = str(error).replace(f"{folder}{os.sep}", "")
            log.write_text(output, encoding="utf-8")
            raise failed_build(job.name, output, log) from None
        partial = library.with_suffix(".partial")
        shutil.copy2(folder / f"{job.name}.so", partial)
    os.replace(partial, library)
    log.unlink(missing_ok=True)


def _load(library: Path, name: str, registers: bool) -> Any:
    try:
        torch.ops.load_library(str(library))
        if hasattr(ctypes.CDLL(str(library)), f"PyInit_{name}"):
            spec = importlib.util.spec_from_file_location(name, library)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    except (OSError, ImportError) as error:
        reason = error.__cause__ or error  # torch puts the loader's own words into the cause
        raise CompileError(f"kfconvert: {name} was compiled but cannot be loaded: {reason}") from error
    if not registers:
        raise CompileError(
            f"kfconvert: {name} has no operator and no PYBIND11_MODULE(TORCH_EXTENSION_NAME, m): register an "
            "operator with STABLE_TORCH_LIBRARY, or name the functions to bind, functions=[...]"
        )
    return torch.ops
