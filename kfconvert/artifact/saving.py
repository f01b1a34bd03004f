"""Saves a converted model as an artifact. See ``artifact.files`` for its files."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .. import folders
from ..json_values import json_ready
from ..own_patterns import PatternError, functions_in
from ..process import one_at_a_time
from ..region import Region
from ..runtime import guarded_forward
from ..version import __version__
from .checksums import has_checksum
from .companions import COMPANIONS, is_of_diffusers, is_of_transformers, write_companions
from .errors import ArtifactError, writing
from .graphs import stored_graphs
from .quantized import flattened, tuples_in
from .record import read_record, sealed
from .results import report_of
from .schema import BUFFERS_FILE, FORMAT, GRAPHS_FILE, RECORD_FILE, REPORT_FILE, WEIGHTS_FILE
from .tensor_files import write_tensors
from .weights import checked_state, other_buffers, state_metadata

# The files that a save writes and replaces.
_OWN = {WEIGHTS_FILE, BUFFERS_FILE, RECORD_FILE, GRAPHS_FILE, REPORT_FILE, *COMPANIONS}


def check_target(path: str | os.PathLike) -> None:
    """Raises ArtifactError if ``save`` would refuse ``path``: it contains something else, or cannot be read."""
    folder = folders.expanded(path)
    with writing(folder):
        if not folder.resolve().exists():
            return
        if not folder.is_dir():
            raise ArtifactError(f"{folder} is a file, not a folder")
        names = folders.names(folder)
        if names and RECORD_FILE not in names:
            raise ArtifactError(f"{folder} is not empty and not a kfconvert artifact: it is not replaced")
        for other in sorted(names - _OWN):
            raise ArtifactError(f"{folder} contains {other}, which is not part of the artifact: it is not replaced")


def save(model: nn.Module, path: str | os.PathLike, source: dict[str, Any] | None = None) -> Path:
    """Write the converted ``model`` to the folder ``path`` and return it.

    The weights file contains the original's ``state_dict``: ``OriginalClass().load_state_dict(...)`` accepts it.
    Weights quantized by torchao are in the format of ``torchao.prototype.safetensors``. Buffers outside of the state
    dict, such as position tables, are in a separate file.
    For a Hugging Face model, the folder also contains its configuration and the files of its tokenizer or processor,
    so that ``from_pretrained`` reads it. ``report.html`` shows what was converted.
    The files of an existing artifact are replaced once the new ones are complete; after any error before, the artifact
    is unchanged. The folder itself remains.

    Args:
        source: the recipe of ``zoo.resolve``, from which ``load`` rebuilds the architecture. By default, the recipe is
            the configuration of a model of transformers or diffusers. For other models, and for models that were
            modified after construction, ``load`` needs ``model=``.

    Raises:
        ArtifactError: ``model`` is not a converted model or was unpickled, its state contains other objects than plain
            tensors and quantized weights of torchao, or it runs a user's function without an importable name. Also if
            ``path`` contains something else, or the disk is full, read-only or not permitted.
    """
    target = folders.expanded(path)
    check_target(target)
    before = _checksums(target)
    # An export of another thread replaces the tensors of the model.
    with one_at_a_time(), writing(target), folders.replacing(target) as folder:
        state = checked_state(model)
        record = record_of(model, state, source)
        tensors, metadata = flattened(state)
        write_tensors(tensors, folder / WEIGHTS_FILE, metadata)
        write_companions(model, folder)
        write_for_load(model, folder, record, state.keys())
    # Unmodified files of the previous artifact that the new one does not have, such as a tokenizer.
    for name in (before.keys() & _OWN) - _checksums(target).keys():
        with contextlib.suppress(OSError):
            if has_checksum(target / name, before[name]):
                (target / name).unlink()
    return target


def write_for_load(
    model: nn.Module,
    folder: Path,
    record: dict[str, Any],
    stored: Collection[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes all files for ``load`` except the tensors ``stored``, and the report: other buffers, graphs, and last the
    ``record``, with checksums of the files in ``folder`` and of the given others."""
    buffers = other_buffers(model, stored)
    if buffers:
        write_tensors(buffers, folder / BUFFERS_FILE)
    graphs = stored_graphs(model, record["device"], *_forms(model), _parts(model))
    if graphs is not None:
        (folder / GRAPHS_FILE).write_text(json.dumps(graphs, allow_nan=False))
    (folder / REPORT_FILE).write_text(report_of(record))
    (folder / RECORD_FILE).write_text(sealed(record, folder, others))


def _checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums of the files of the artifact in ``folder``, by name; empty if it is not readable."""
    try:
        return read_record(folder)["files"]
    except ArtifactError:
        return {}


def record_of(model: nn.Module, state: dict[str, Tensor], source: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the content of ``kfconvert.json`` for the converted ``model`` with this ``state`` dict, except for the
    files; raises like ``save``."""
    if not hasattr(model, "kfconvert_info"):
        raise ArtifactError(f"this {type(model).__name__} is not a converted model")
    info: Any = model.kfconvert_info
    if any(forward.was_pickled for forward in info.__self__.guarded.values()):
        raise ArtifactError(
            f"this {type(model).__name__} was unpickled, which loses fused programs: convert the original again"
        )
    sample = next((t for t in model.parameters() if t.is_floating_point()), None)
    statistics = json_ready({key: value for key, value in info().items() if key != "guard"})
    try:
        for own in statistics.get("own_patterns", ()):
            functions_in(own)
    except PatternError as error:
        raise ArtifactError(f"this {type(model).__name__} cannot be saved: {error}") from error
    return {
        "format": FORMAT,
        "versions": {"kfconvert": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "device": str(sample.device) if sample is not None else "cpu",
        "dtype": str(sample.dtype).removeprefix("torch.") if sample is not None else None,
        "recipe": source or _recipe(model),
        "calls": [_example(region, "the model") for region in _forms(model)[0]],
        "parts": [
            {"modules": paths, "call": _example(region, paths[0]), "free": region.guard.free}
            for region, paths in _parts(model)
        ],
        "statistics": statistics,
        "state_metadata": state_metadata(state),
        "quantized": tuples_in(state),
    }


def _recipe(model: nn.Module) -> dict[str, Any] | None:
    """Returns how ``load`` builds such a model; None if unknown, for example after its forward was patched."""
    if not (is_of_transformers(model) or is_of_diffusers(model)):
        return None
    from .. import zoo

    for module in model.modules():
        guarded = guarded_forward(module)
        if (vars(module).get("forward") if guarded is None else guarded.own_forward) is not None:
            return None
    return zoo.described(model)


def _forms(model: nn.Module) -> tuple[list[Region], list[Region]]:
    """Returns the region of each converted call form, and those of the calls that ``generate`` makes; if graphs of the
    latter cannot be stored, ``load`` captures them again. Both are empty if nothing was fused."""
    guarded = guarded_forward(model)
    calls, generation = list[Region](), list[Region]()
    for region in guarded.regions if guarded else ():
        (generation if calls and region.call.form.caches else calls).append(region)
    return calls, generation


def _parts(model: nn.Module) -> list[tuple[Region, list[str]]]:
    """Returns the regions of the separately captured submodules, each with the paths of its modules."""
    parts: dict[int, tuple[Region, list[str]]] = {}
    for path, module in model.named_modules():
        guarded = guarded_forward(module) if path else None
        for region in guarded.regions if guarded else ():
            parts.setdefault(id(region), (region, []))[1].append(path)
    return list(parts.values())


def _example(region: Region, owner: str) -> Any:
    if region.example is None:
        raise ArtifactError(f"the example inputs of {owner} contain a value that JSON cannot represent")
    return region.example
