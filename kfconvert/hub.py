"""``save_pretrained`` of a converted Hugging Face model, by which ``push_to_hub`` writes as well."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from .runtime import OfConversion, WeakModule


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
            model.__dict__.pop("_upload_modified_files", None)
            beside()  # so that the hub gets it, too
            return type(model)._upload_modified_files(model, *uploaded, **options)

        if given.get("push_to_hub", False):
            model.__dict__["_upload_modified_files"] = upload
        try:
            plain(model, *args, **kwargs)
        finally:
            model.__dict__.pop("_upload_modified_files", None)
        beside()


def install_save_pretrained(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` write an artifact, where its class has that of transformers."""
    method = getattr(type(model), "save_pretrained", None)
    of_transformers = getattr(method, "__module__", "") == "transformers.modeling_utils"
    if of_transformers and "save_pretrained" not in vars(model):
        model.__dict__["save_pretrained"] = SavePretrained(model)
