"""``save_pretrained`` and ``push_to_hub`` of converted models of transformers or diffusers also write an artifact."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from .. import folders
from ..process import one_at_a_time
from .checksums import checksum
from .companions import CONFIG_FILES, is_of_diffusers
from .errors import ArtifactError, reading, writing
from .quantized import flattened
from .record import read_json
from .saving import record_of, write_for_load
from .schema import DIFFUSION_WEIGHTS_FILE, RECORD_FILE, WEIGHTS_FILE
from .weights import checked_state, missing_from

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
        if not _complete(model, folder):
            reason = "the model cannot be rebuilt from its configuration"
            warnings.warn(f"kfconvert.load will need model= for this folder: {reason}", stacklevel=3)
    except ArtifactError as error:
        warnings.warn(f"kfconvert.load will not read this folder: {error}", stacklevel=3)


def _complete(model: nn.Module, folder: Path) -> bool:
    """Make an artifact of ``folder``, where ``save_pretrained`` wrote the converted ``model``. Returns whether it has a
    recipe for the model; without one, ``load`` needs ``model=``.

    Raises:
        ArtifactError: ``save`` would refuse the model, its weights are missing or have other names than in the state
            dict, or the folder cannot be written. An existing record is deleted in this case.
    """
    with writing(folder):
        (folder / RECORD_FILE).unlink(missing_ok=True)  # belongs to the previous weights
        weights = _weights(folder, DIFFUSION_WEIGHTS_FILE if is_of_diffusers(model) else WEIGHTS_FILE)
        shapes = {key: shape for name in weights for key, shape in _shapes(folder / name).items()}
        configurations = [name for name in sorted(CONFIG_FILES) if (folder / name).exists()]
        others = {name: checksum(folder / name) for name in (*weights, *configurations)}
        with one_at_a_time(), folders.replacing(folder) as partial:  # see ``save``
            state = checked_state(model)
            record = record_of(model, state)
            key = missing_from(shapes, flattened(state)[0])
            if key is not None:
                raise ArtifactError(f"{folder} does not contain the weights of the model unchanged: {key!r}")
            write_for_load(model, partial, record, state.keys(), others)
        return bool(record["recipe"])


def _weights(folder: Path, name: str) -> list[str]:
    """Returns the weights files: the file of this ``name``, or the files in an index."""
    index_file = folder / f"{name}.index.json"
    if (folder / name).exists() or not index_file.exists():
        return [name]
    return sorted(set(read_json(index_file)["weight_map"].values()))


def _shapes(file: Path) -> dict[str, list[int]]:
    with reading(file), safe_open(file, framework="pt") as stored:
        return {key: stored.get_slice(key).get_shape() for key in stored.keys()}
