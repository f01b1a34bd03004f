"""``save_pretrained`` of a converted model of transformers or diffusers, which ``push_to_hub`` also uses."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .runtime import OfConversion, WeakModule

# The Python modules whose ``save_pretrained`` is replaced, each with its method to upload a folder.
_UPLOADS = {
    "transformers.modeling_utils": "_upload_modified_files",
    "diffusers.models.modeling_utils": "_upload_folder",
}


class SavePretrained(OfConversion):
    """Replaces ``save_pretrained`` in the instance dict of a converted model: writes the files of its class, and the
    files of ``load``. If the latter is not possible, it gives a one-line warning."""

    __name__ = "save_pretrained"

    def __init__(self, model: nn.Module):
        self._model = WeakModule(model)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from .artifact import ArtifactError, write_beside  # a higher package, so import it here

        model: Any = self._model()
        plain = type(model).save_pretrained
        upload_name = _UPLOADS[plain.__module__]
        given = inspect.signature(plain).bind(model, *args, **kwargs).arguments
        folder, is_main = Path(given["save_directory"]), given.get("is_main_process", True)
        written: list[bool] = []

        def beside() -> None:
            if written or not is_main or not folder.is_dir():
                return
            written.append(True)
            try:
                if not write_beside(model, folder):
                    reason = "the model cannot be rebuilt from its configuration"
                    warnings.warn(f"kfconvert.load will need model= for this folder: {reason}", stacklevel=3)
            except ArtifactError as error:
                warnings.warn(f"kfconvert.load will not read this folder: {error}", stacklevel=3)

        def upload(*uploaded: Any, **options: Any) -> Any:
            model.__dict__.pop(upload_name, None)
            beside()  # before the upload
            return getattr(type(model), upload_name)(model, *uploaded, **options)

        if given.get("push_to_hub", False):
            model.__dict__[upload_name] = upload
        try:
            plain(model, *args, **kwargs)
        finally:
            model.__dict__.pop(upload_name, None)
        beside()


def install_save_pretrained(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of ``model`` write an artifact, if its class is from transformers or diffusers."""
    method = getattr(type(model), "save_pretrained", None)
    if getattr(method, "__module__", "") in _UPLOADS and "save_pretrained" not in vars(model):
        model.__dict__["save_pretrained"] = SavePretrained(model)
