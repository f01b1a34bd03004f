"""``save_pretrained`` and ``push_to_hub`` of converted models of transformers or diffusers also write an artifact."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .errors import ArtifactError
from .sidecar import write_beside

# The Python modules of the classes with ``save_pretrained``, each with its method to upload a folder.
_UPLOADS = {
    "transformers.modeling_utils": "_upload_modified_files",
    "diffusers.models.modeling_utils": "_upload_folder",
}
_extended: set[type] = set()


def extend_save_pretrained(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of a converted model write the files of ``load``, too, or warn in one line.

    The base class in transformers or diffusers gets the method, once per process; it does nothing else for models that
    are not converted. A method in the instance dict could not keep the model alive in
    ``convert(model).save_pretrained(path)``.
    """
    for base in type(model).__mro__:
        if base.__module__ in _UPLOADS and "save_pretrained" in vars(base) and base not in _extended:
            _extended.add(base)
            own: Any = base
            own.save_pretrained = _with_artifact(own.save_pretrained, _UPLOADS[base.__module__])


def _with_artifact(plain: Callable[..., Any], upload_name: str) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "kfconvert_info" not in vars(model):
            return plain(model, *args, **kwargs)
        given = signature.bind(model, *args, **kwargs).arguments
        folder, is_main = Path(given["save_directory"]), given.get("is_main_process", True)
        write = functools.cache(functools.partial(_write, model, folder))

        def upload(*uploaded: Any, **options: Any) -> Any:
            model.__dict__.pop(upload_name, None)
            if is_main:
                write()  # before the upload
            return getattr(type(model), upload_name)(model, *uploaded, **options)

        if given.get("push_to_hub", False):
            model.__dict__[upload_name] = upload
        try:
            result = plain(model, *args, **kwargs)
        finally:
            model.__dict__.pop(upload_name, None)
        if is_main:
            write()
        return result

    return save_pretrained


def _write(model: nn.Module, folder: Path) -> None:
    """Writes the files of ``load`` to ``folder``, which has the weights."""
    if not folder.is_dir():
        return
    try:
        if not write_beside(model, folder):
            reason = "the model cannot be rebuilt from its configuration"
            warnings.warn(f"kfconvert.load will need model= for this folder: {reason}", stacklevel=3)
    except ArtifactError as error:
        warnings.warn(f"kfconvert.load will not read this folder: {error}", stacklevel=3)
