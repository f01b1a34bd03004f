"""What ``load`` reads beside the weights that ``save_pretrained`` of a converted Hugging Face model has written."""

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
from .files import record_of, telling
from .record import RecordError
from .schema import DIFFUSION_WEIGHTS_FILE, RECORD_FILE, WEIGHTS_FILE
from .weights import checked_state, missing_from


def write_beside(model: nn.Module, folder: Path) -> bool:
    """Make an artifact of ``folder``, to which ``save_pretrained`` has written the converted ``model``; whether it says
    how to build the model, for which ``load`` needs ``model=`` else.

    Raises:
        ArtifactError: ``save`` would refuse the model, its weights are not there, or under other names than the state
            dict has, or the folder cannot be written. A record that was there is gone then.
    """
    try:
        (folder / RECORD_FILE).unlink(missing_ok=True)  # of the weights that were there before
        weights = _weights(folder, DIFFUSION_WEIGHTS_FILE if is_of_diffusers(model) else WEIGHTS_FILE)
        shapes = dict(_shapes(folder / name for name in weights))
        with one_at_a_time():  # see ``save``
            state = checked_state(model)
            record = record_of(model, state)
            key = missing_from(shapes, state)
            if key is not None:
                raise ArtifactError(f"{folder} does not hold the weights of the model as they are: {key!r}")
            write_told = telling(model, record, state.keys())
        others = {name: record_file.checksum(folder / name) for name in [*weights, *_configurations(folder)]}
        with folders.replacing(folder) as partial:
            write_told(partial, others)
        return bool(record["recipe"])
    except (OSError, SafetensorError, RecordError) as error:
        raise ArtifactError(f"cannot write {folder}: {why(error)}") from error


def _weights(folder: Path, name: str) -> list[str]:
    """The files of the weights: the one of this ``name``, or those that an index names."""
    index_file = folder / f"{name}.index.json"
    if (folder / name).exists() or not index_file.exists():
        return [name]
    index = record_file.read_json(index_file)
    return sorted(set(index["weight_map"].values()))


def _configurations(folder: Path) -> list[str]:
    return [name for name in sorted(CONFIG_FILES) if (folder / name).exists()]


def _shapes(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """(key, shape) of each tensor in ``files``."""
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():
                yield key, stored.get_slice(key).get_shape()
