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
        call = inspect.signature(type(model).save_pretrained).bind(model, *args, **kwargs)
        pushed, options = call.arguments.pop("push_to_hub", False), dict(call.arguments.get("kwargs", {}))
        # What is pushed must have been written, so that the weights are written first and the hub gets them later.
        type(model).save_pretrained(*call.args, **call.kwargs)
        folder = Path(call.arguments["save_directory"])
        if folder.is_dir() and call.arguments.get("is_main_process", True):
            try:
                write_beside(model, folder)
            except ArtifactError as error:
                warnings.warn(f"kfconvert.load will not read what was saved: {error}", stacklevel=2)
        if pushed:
            name = options.pop("repo_id", folder.name)
            known = inspect.signature(model.push_to_hub).parameters
            given = {**options, **{key: call.arguments[key] for key in ("token",) if key in call.arguments}}
            model.push_to_hub(name, **{key: value for key, value in given.items() if key in known})


def install_save_pretrained(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` write an artifact, where its class has that of transformers."""
    method = getattr(type(model), "save_pretrained", None)
    of_transformers = getattr(method, "__module__", "") == "transformers.modeling_utils"
    if of_transformers and "save_pretrained" not in vars(model):
        model.__dict__["save_pretrained"] = SavePretrained(model)
