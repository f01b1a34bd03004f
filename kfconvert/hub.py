"""``save_pretrained`` of a converted model of transformers or diffusers, by which ``push_to_hub`` writes as well."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .runtime import OfConversion, WeakModule

# The Python modules whose ``save_pretrained`` this stands for, each with the method by which it uploads a folder.
_UPLOADS = {
    "transformers.modeling_utils": "_upload_modified_files",
    "diffusers.models.modeling_utils": "_upload_folder",
}


class SavePretrained(OfConversion):
    """Stands as ``save_pretrained`` in the instance dict of a converted model: writes what that of its class writes,
    and what ``load`` reads beside. Where that cannot be, it warns in one line, and the folder is that of any model."""

    __name__ = "save_pretrained"

    def __init__(self, model: nn.Module):
        self._model = WeakModule(model)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from .artifact import ArtifactError, write_beside  # which converts models, and so lies above

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
                    reason = "its configuration alone does not make the model that it is"
                    warnings.warn(f"kfconvert.load will need model= for what was saved: {reason}", stacklevel=3)
            except ArtifactError as error:
                warnings.warn(f"kfconvert.load will not read what was saved: {error}", stacklevel=3)

        def upload(*uploaded: Any, **options: Any) -> Any:
            model.__dict__.pop(upload_name, None)
            beside()  # so that the hub gets it, too
            return getattr(type(model), upload_name)(model, *uploaded, **options)

        if given.get("push_to_hub", False):
            model.__dict__[upload_name] = upload
        try:
            plain(model, *args, **kwargs)
        finally:
            model.__dict__.pop(upload_name, None)
        beside()


def install_save_pretrained(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` write an artifact, where its class has that of transformers or diffusers."""
    method = getattr(type(model), "save_pretrained", None)
    if getattr(method, "__module__", "") in _UPLOADS and "save_pretrained" not in vars(model):
        model.__dict__["save_pretrained"] = SavePretrained(model)
