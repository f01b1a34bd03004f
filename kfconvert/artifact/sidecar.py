"""Files for ``load`` next to the weights that ``save_pretrained`` of a converted Hugging Face model wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from .. import folders
from ..process import one_at_a_time
from . import record as record_file
from .companions import CONFIG_FILES, is_of_diffusers
from .errors import ArtifactError, why
from .record import RecordError
from .saving import record_of, telling
from .schema import DIFFUSION_WEIGHTS_FILE, RECORD_FILE, WEIGHTS_FILE
from .weights import checked_state, missing_from


def write_beside(model: nn.Module, folder: Path) -> bool:
    """Make an artifact of ``folder``, where ``save_pretrained`` wrote the converted ``model``. Returns whether it has a
    recipe for the model; without one, ``load`` needs ``model=``.

    Raises:
        ArtifactError: ``save`` would refuse the model, its weights are missing or have other names than in the state
            dict, or the folder cannot be written. An existing record is deleted in this case.
    """
    try:
        (folder / RECORD_FILE).unlink(missing_ok=True)  # belongs to the previous weights
        weights = _weights(folder, DIFFUSION_WEIGHTS_FILE if is_of_diffusers(model) else WEIGHTS_FILE)
        shapes = dict(_shapes(folder / name for name in weights))
        with one_at_a_time():  # see ``save``
            state = checked_state(model)
            record = record_of(model, state)
            key = missing_from(shapes, state)
            if key is not None:
                raise ArtifactError(f"{folder} does not contain the weights of the model unchanged: {key!r}")
            write_told = telling(model, record, state.keys())
        others = {name: record_file.checksum(folder / name) for name in [*weights, *_configurations(folder)]}
        with folders.replacing(folder) as partial:
            write_told(partial, others)
        return bool(record["recipe"])
    except (OSError, SafetensorError, RecordError) as error:
        raise ArtifactError(f"cannot write {folder}: {why(error)}") from error


def _weights(folder: Path, name: str) -> list[str]:
    """Returns the weights files: the file of this ``name``, or the files in an index."""
    index_file = folder / f"{name}.index.json"
    if (folder / name).exists() or not index_file.exists():
        return [name]
    index = record_file.read_json(index_file)
    return sorted(set(index["weight_map"].values()))


def _configurations(folder: Path) -> list[str]:
    return [name for name in sorted(CONFIG_FILES) if (folder / name).exists()]


def _shapes(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Yields (key, shape) of each tensor in ``files``."""
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():
                yield key, stored.get_slice(key).get_shape()
