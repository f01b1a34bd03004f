"""A library to compile: its sources and all inputs of the compilation."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A library to compile. ``path`` is the user's file, or None if there is only ``text``."""

    name: str
    text: str
    path: Path | None
    functions: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    include_paths: tuple[Path, ...]

    def headers(self) -> dict[Path, str]:
        """Returns the text of each header that the source includes from user folders, directly or indirectly."""
        found: dict[Path, str] = {}
        pending = [(self.text, self.path)]
        while pending:
            text, source = pending.pop()
            folders = (source.parent, *self.include_paths) if source else self.include_paths
            for include in _INCLUDE.findall(text):
                candidates = ((folder / include).resolve() for folder in folders)
                header = next((path for path in candidates if path.is_file()), None)
                if header and header not in found:
                    found[header] = read(header)
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
        """Writes the file to compile and returns its path: the user's file if possible, so that errors name it."""
        source = self.path
        if source is None:
            source = folder / f"{self.name}.cu"
            source.write_text(self.text, encoding="utf-8")
        if not self.functions:
            return source
        # Includes the source instead of appending to it, to keep line numbers.
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


def read(path: Path) -> str:
    """Returns the text of a source in any encoding."""
    return path.read_text(encoding="utf-8", errors="replace")
