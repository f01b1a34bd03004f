"""Which names the installed libraries know, read from their source files: importing them takes seconds."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from .architectures import ALIASES, ARCHITECTURES

# @register_model, @register_model() or @register_model(name="..."), further decorators, def ...
_REGISTERED = re.compile(
    r'^@register_model(?:\((?:name="(\w+)")?\))?[ \t]*\n(?:@.*\n|[ )\t].*\n)*def (\w+)', re.MULTILINE
)


@cache
def _sources(library: str) -> dict[str, str]:
    """The text of each file of ``<library>.models``; nothing where the library is not installed."""
    spec = importlib.util.find_spec(library)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder, "models").rglob("*.py")]
    return {file.as_posix(): file.read_text(encoding="utf-8", errors="replace") for file in files}


def installed(library: str) -> bool:
    return bool(_sources(library))


def may_have(library: str, name: str) -> bool:
    """Whether ``library`` ("torchvision" or "timm") may have a model ``name``: the word is in its model files.

    False is certain. timm takes ``<name>.<tag>`` as well.
    """
    word = re.compile(rf"\b{re.escape(name.partition('.')[0])}\b")
    return bool(name) and any(word.search(text) for text in _sources(library).values())


def names_of(library: str) -> list[str]:
    """The names of models that ``library`` ("torchvision" or "timm") has and that can be converted by their names, as
    far as its own files tell: none where it is not installed."""
    found: set[str] = set()
    for file, text in _sources(library).items():
        if not re.search(r"/models/(?:detection|quantization)/", file):
            found.update(named or defined for named, defined in _REGISTERED.findall(text))
    return sorted(found)


def names() -> set[str]:
    """The names to suggest in place of an unknown one: of torchvision, timm and the built-in architectures."""
    return {*ARCHITECTURES, *ALIASES, *names_of("torchvision"), *names_of("timm")}
