"""Who has written a Python module: Python, torch and this package, or the author of a model."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

# pytest inserts its own calls into assertions.
_OF_LIBRARIES = frozenset(("torch", "numpy", "kfconvert", "pytest", "_pytest", "pluggy", *sys.stdlib_module_names))


@functools.cache
def is_of_author(module: str | None) -> bool:
    """Whether the Python module of this name belongs neither to Python nor to torch, numpy or this package."""
    root = (module or "").partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root not in _OF_LIBRARIES
    # An author's module may have the name of a module of Python, such as ``code``.
    file = os.path.realpath(getattr(sys.modules.get(root), "__file__", None) or os.__file__)
    return _is_installed(file) or not file.startswith(os.path.realpath(sysconfig.get_path("stdlib")))


@functools.cache
def is_of_project(module: str | None) -> bool:
    """Whether the Python module of this name is the user's own: an author's module outside of installed libraries."""
    return is_of_author(module) and not _is_installed(getattr(sys.modules.get(module or ""), "__file__", None) or "")


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file
