"""The model names of installed libraries, read from source files because importing the libraries takes seconds."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from .architectures import ARCHITECTURES

# @register_model, @register_model() or @register_model(name="..."), further decorators, def ...
_REGISTERED = re.compile(
    r'^@register_model(?:\((?:name="(\w+)")?\))?[ \t]*\n(?:@.*\n|[ )\t].*\n)*def (\w+)', re.MULTILINE
)


@cache
def _sources(library: str) -> dict[str, str]:
    """The text of each file of ``<library>.models``; empty if the library is not installed."""
    spec = importlib.util.find_spec(library)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder, "models").rglob("*.py")]
    return {file.as_posix(): file.read_text(encoding="utf-8", errors="replace") for file in files}


def installed(library: str) -> bool:
    return bool(_sources(library))


def may_have(library: str, name: str) -> bool:
    """Whether ``name`` occurs in the model files of ``library`` ("torchvision" or "timm").

    If False, the library has no such model. timm also accepts ``<name>.<tag>``.
    """
    word = re.compile(rf"\b{re.escape(name.partition('.')[0])}\b")
    return bool(name) and any(word.search(text) for text in _sources(library).values())


def names_of(library: str) -> list[str]:
    """Returns the convertible model names in the files of ``library`` ("torchvision" or "timm"); empty if it is not
    installed."""
    found: set[str] = set()
    for file, text in _sources(library).items():
        if not re.search(r"/models/(?:detection|quantization)/", file):
            found.update(named or defined for named, defined in _REGISTERED.findall(text))
    return sorted(found)


def names() -> set[str]:
    """Returns names to suggest for an unknown one: of torchvision, timm and the built-in architectures."""
    return {*ARCHITECTURES, *names_of("torchvision"), *names_of("timm")}
