"""Converted models on disk: ``model.safetensors`` with the original's keys, ``kfconvert.json``, ``report.html``.

``load`` rebuilds the architecture, loads the weights, and converts again with the recorded decisions, without timing.
Results that a conversion derives (folded BatchNorms, packed weights, programs) are not stored.
Nothing is pickled, and code named in an artifact runs only with the caller's permission.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .. import folders
from ..conversion import (
    AsGiven,
    check_callback,
    check_thread,
    first_line,
    given_back_on_error,
    leave_as_it_is,
    resolve_device,
)
from ..converter import ConversionError, ModelConverter
from ..inputs import InputSpecError, build
from ..json_values import json_ready
from ..matching import Pattern
from ..own_patterns import PatternError, functions_in, rebuilt
from ..patterns import only_own
from ..process import level_outside, one_at_a_time, only_new_garbage
from ..region import Region, Unstorable
from ..runtime import OnMiss, guarded_forward
from ..version import __version__
from . import record as record_file
from .companions import COMPANIONS, is_of_diffusers, is_of_transformers, remember_origin, write_companions
from .errors import ArtifactError, no_artifact, printable, why
from .graphs import stored_graphs
from .record import RecordError
from .replay import config_of, replay
from .report_file import report_of
from .schema import (
    BUFFERS_FILE,
    FORMAT,
    GRAPHS_FILE,
    RECORD_FILE,
    REPORT_FILE,
    WEIGHTS_FILE,
    StoredGraphs,
    weights_files,
)
from .weights import checked_state, fill, fill_buffers, other_buffers, state_metadata, storable


def check_target(path: str | os.PathLike) -> None:
    """Raises ArtifactError if ``save`` would refuse ``path``: it contains something else, or cannot be read."""
    folder = folders.expanded(path)
    try:
        _check_target(folder)
    except (OSError, ValueError, RuntimeError) as error:  # an invalid name is a ValueError, a link loop a RuntimeError
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"cannot write {printable(folder)}: {why(error)}") from error


def _check_target(folder: Path) -> None:
    folder.resolve()
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is a file, not a folder")
    names = folders.names(folder)
    if names and RECORD_FILE not in names:
        raise ArtifactError(f"{folder} is not empty and not a kfconvert artifact: it is not replaced")
    others = sorted(names - {WEIGHTS_FILE, BUFFERS_FILE, RECORD_FILE, GRAPHS_FILE, REPORT_FILE} - COMPANIONS)
    if others:
        raise ArtifactError(f"{folder} contains {others[0]}, which is not part of the artifact: it is not replaced")


def save(model: nn.Module, path: str | os.PathLike, source: dict[str, Any] | None = None) -> Path:
    """Write the converted ``model`` to the folder ``path`` and return it.

    The weights file contains the original's ``state_dict``: ``OriginalClass().load_state_dict(...)`` accepts it.
    Buffers outside of the state dict, such as position tables, are in a separate file.
    For a Hugging Face model, the folder also contains its configuration and the files of its tokenizer or processor,
    so that ``from_pretrained`` reads it. ``report.html`` shows what was converted.
    An existing artifact is replaced once the new one is complete; after any error it is unchanged. The folder
    itself remains, and concurrent saves all succeed.

    Args:
        source: the recipe of ``zoo.resolve``, from which ``load`` rebuilds the architecture. By default, the recipe is
            the configuration of a model of transformers or diffusers. For other models, and for models that were
            modified after construction, ``load`` needs ``model=``.

    Raises:
        ArtifactError: ``model`` is not a converted model, its state contains other objects than plain tensors, or it
            runs a user's function without an importable name. Also if ``path`` contains something else, or the disk is
            full, read-only or not permitted.
    """
    target = folders.expanded(path)
    check_target(target)
    with one_at_a_time():  # an export replaces the tensors meanwhile
        state = checked_state(model)
        tensors, record = storable(state), record_of(model, state, source)
        write_told = telling(model, record, tensors.keys())
    before = _files_of(target)
    try:
        with folders.replacing(target) as folder:
            save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
            write_companions(model, folder)
            write_told(folder, {})
        _remove_stale(target, before)
    except (OSError, SafetensorError, RecordError) as error:
        raise ArtifactError(f"cannot write {target}: {why(error)}") from error
    return target


def telling(
    model: nn.Module, record: dict[str, Any], stored: Collection[str]
) -> Callable[[Path, Mapping[str, Any]], None]:
    """Returns a function that writes all files for ``load`` except the tensors ``stored``, and the report: other
    buffers, graphs, and last the ``record``, with checksums of the files there and of the given others."""
    buffers = other_buffers(model, stored)
    graphs = stored_graphs(model, record["device"], _calls(model), _generation(model), _parts(model))

    def write(folder: Path, others: Mapping[str, Any]) -> None:
        if buffers:
            save_file(buffers, folder / BUFFERS_FILE, metadata={"format": "pt"})
        if graphs is not None:
            (folder / GRAPHS_FILE).write_text(json.dumps(graphs, allow_nan=False))
        (folder / REPORT_FILE).write_text(report_of(record))
        (folder / RECORD_FILE).write_text(record_file.sealed(record, folder, others))
        # safetensors creates files that only their owner may read; use the folder's permissions instead.
        for file in folder.iterdir():
            file.chmod((folder / RECORD_FILE).stat().st_mode)

    return write


def _files_of(folder: Path) -> dict[str, Any]:
    """Returns the checksums of the files of the artifact in ``folder``, by name; empty if it is not readable."""
    try:
        return record_file.read(folders.newest(folder, RECORD_FILE)).get("files", {})
    except (OSError, RecordError):
        return {}


def _remove_stale(folder: Path, before: dict[str, Any]) -> None:
    """Remove unmodified files of the previous artifact, in ``before``, that are not part of the current artifact, such
    as a tokenizer."""
    with folders.writing(folder):
        for name in (before.keys() & (COMPANIONS | {BUFFERS_FILE, GRAPHS_FILE})) - _files_of(folder).keys():
            with contextlib.suppress(FileNotFoundError, RecordError):
                if record_file.checksum(folder / name) == before[name]:
                    (folder / name).unlink()


def load(
    path: str | os.PathLike,
    model: nn.Module | type[nn.Module] | None = None,
    device: torch.device | str | None = None,
    trust_source: bool = False,
    on_miss: OnMiss | None = None,
) -> nn.Module:
    """Loads the converted model from the folder ``path``, in eval mode.

    Args:
        model: an instance of the original class, or the class if it takes no arguments; needed if the artifact has no
            recipe. The instance receives the weights and becomes the converted model.
        device: device of the model, ``"auto"`` for CUDA if available; by default the recorded device, or the CPU, with
            a warning, if there is no GPU.
        trust_source: run the user code ``package.module:function`` that the recipe names, and the functions of the
            user's patterns (see ``register_pattern``). These need not be registered.
        on_miss: as in ``ModelConverter``.

    Raises:
        ConversionError: ``on_miss`` cannot be called, or the call is within a ``TorchFunctionMode``.
        ArtifactError: the artifact is missing, unreadable, damaged or of another format version; the weights do not fit
            the model; the device does not exist; the recipe is missing or untrusted; or a function is untrusted.
    """
    check_callback(on_miss)
    check_thread()
    folder = folders.expanded(path)
    record, tensors, buffers, graphs = _read(folder, trust_source)
    place = _device(record, device)
    with one_at_a_time():  # libraries set global state, such as the default dtype, when they build a model
        made = _made(folder, record, tensors, buffers, model, trust_source)
        with only_own(_own_patterns(folder, record)):
            return _convert_again(made.to(place).eval(), record, place, folder, on_miss, graphs)


def load_original(
    path: str | os.PathLike, device: torch.device | str | None = None, trust_source: bool = False
) -> tuple[nn.Module, Any]:
    """Returns the original model of the artifact in the folder ``path``, in eval mode on the device that ``load`` would
    choose, and example inputs for ``ModelConverter.convert_model`` on that device.

    Raises:
        ArtifactError: see ``load``; or the artifact does not record its inputs.
    """
    folder = folders.expanded(path)
    record, tensors, buffers, _ = _read(folder, trust_source)
    place = _device(record, device)
    with one_at_a_time():
        made = _made(folder, record, tensors, buffers, None, trust_source)
    try:
        return made.to(place).eval(), build(_example_of(record), place)
    except InputSpecError as error:
        raise ArtifactError(f"{folder} does not say which inputs its model takes: {error}") from error


def read_record(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the content of ``kfconvert.json`` in the folder ``path``. Raises ArtifactError, see ``load``."""
    folder = folders.expanded(path)
    with _reading(folder):
        return _read_record(folder)


def _read(
    folder: Path, trust_source: bool
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], dict[str, Any] | None]:
    """Returns the record, the tensors of the state dict, the other buffers, and the traced graphs."""
    with _reading(folder):
        record = _read_record(folder)
        _check_trust(folder, record, trust_source)
        tensors: dict[str, Tensor] = {}
        for name in weights_files(record.get("files", {})) or [WEIGHTS_FILE]:
            tensors |= _read_tensors(folder, record, name)
        # Another file of this name belongs to another artifact.
        buffers = _read_tensors(folder, record, BUFFERS_FILE) if BUFFERS_FILE in record.get("files", {}) else {}
        graphs = _read_graphs(folder, record) if GRAPHS_FILE in record.get("files", {}) else None
    return record, tensors, buffers, graphs


def _made(
    folder: Path,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    buffers: dict[str, Tensor],
    model: nn.Module | type[nn.Module] | None,
    trust_source: bool,
) -> nn.Module:
    """Returns the original model with its weights, on the CPU or on the device of ``model``."""
    made = _architecture(folder, record, tensors, model, trust_source)
    name = next((name for name, t in chain(made.named_parameters(), made.named_buffers()) if t.is_meta), None)
    if name is not None:
        raise ArtifactError(f"{folder}: the model is on the device meta, where {name} has no data to fill")
    fill(made, tensors, record.get("state_metadata"), folder)
    fill_buffers(made, buffers)
    return made


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Context manager in which no save replaces the files."""
    try:
        with folders.reading(folder):
            yield
    except (FileNotFoundError, NotADirectoryError):
        raise no_artifact(folder) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{printable(folder)} cannot be read: {why(error)}") from error


def _read_record(folder: Path) -> dict[str, Any]:
    file = folders.newest(folder, RECORD_FILE)
    try:
        return record_file.read(file)
    except FileNotFoundError:
        raise no_artifact(folder) from None
    except RecordError as error:
        raise ArtifactError(f"{file} {error}") from error
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {why(error)}") from error


def record_of(model: nn.Module, state: dict[str, Tensor], source: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the content of ``kfconvert.json`` for the converted ``model`` with this ``state`` dict, except for the
    files; raises like ``save``."""
    if not hasattr(model, "kfconvert_info"):
        raise ArtifactError(f"this {type(model).__name__} is not a converted model")
    info: Any = model.kfconvert_info
    sample = next((t for t in model.parameters() if t.is_floating_point()), None)
    statistics = json_ready({key: value for key, value in info().items() if key != "guard"})
    try:
        for own in statistics.get("own_patterns", ()):
            functions_in(own)
    except PatternError as error:
        raise ArtifactError(f"this {type(model).__name__} cannot be saved: {error}") from error
    return {
        "format": FORMAT,
        "versions": {
            "kfconvert": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "device": str(sample.device) if sample is not None else "cpu",
        "dtype": str(sample.dtype).removeprefix("torch.") if sample is not None else None,
        "recipe": source or _recipe(model),
        "calls": [_example(region, "the model") for region in _calls(model)],
        "parts": [
            {"modules": paths, "call": _example(region, paths[0]), "free": region.guard.free}
            for region, paths in _parts(model)
        ],
        "statistics": statistics,
        "state_metadata": state_metadata(state),
    }


def _check_trust(folder: Path, record: dict[str, Any], trust_source: bool) -> None:
    """Raises ArtifactError if the artifact contains a user's functions, unless the caller trusts them."""
    for own in record["statistics"].get("own_patterns", []) if not trust_source else ():
        raise ArtifactError(
            f"{folder}: its pattern {own['name']!r} runs the function {own['replacement']} in place of "
            f"{own['reference']}: pass trust_source=True if you trust that code"
        )


def _own_patterns(folder: Path, record: dict[str, Any]) -> list[Pattern]:
    """Returns the applied patterns of the user, rebuilt from the functions in the record."""
    try:
        return [rebuilt(own) for own in record["statistics"].get("own_patterns", [])]
    except PatternError as error:
        raise ArtifactError(f"{folder}: {error}") from error


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


def _calls(model: nn.Module) -> list[Region]:
    """Returns the region of each converted call form; empty if nothing was fused. Calls that ``generate`` makes are
    excluded: if their graphs cannot be stored, ``load`` captures them again."""
    regions = _forms(model)
    return regions[:1] + [region for region in regions[1:] if not region.call.form.caches]


def _generation(model: nn.Module) -> list[Region]:
    """Returns the regions of the calls that ``generate`` makes."""
    return [region for region in _forms(model)[1:] if region.call.form.caches]


def _forms(model: nn.Module) -> list[Region]:
    guarded = guarded_forward(model)
    return guarded.regions if guarded else []


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


def _read_tensors(folder: Path, record: dict[str, Any], name: str) -> dict[str, Tensor]:
    return _checked(folder, record, name, load_file)


def _read_graphs(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    return _checked(folder, record, GRAPHS_FILE, partial(record_file.read_as, StoredGraphs))


def _checked(folder: Path, record: dict[str, Any], name: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Returns what ``read`` returns for the file of this name if it matches the ``record``."""
    file = folders.newest(folder, name)
    try:
        record_file.check_file(file, record.get("files", {}).get(name))
        return read(file)
    except FileNotFoundError:
        raise ArtifactError(f"{file} is missing") from None
    except RecordError as error:
        raise ArtifactError(f"{file} {error}") from error
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:  # RuntimeError: a damaged header
        raise ArtifactError(f"{file} cannot be read: {why(error)}") from error


def _device(record: dict[str, Any], device: torch.device | str | None) -> torch.device:
    if device is None:
        device = str(record.get("device"))
        if device.startswith("cuda") and not torch.cuda.is_available():
            warnings.warn(
                "the model was converted for a CUDA GPU, which is not available: it is converted for the CPU",
                stacklevel=level_outside(),
            )
            return torch.device("cpu")
    try:
        place = resolve_device(device, nn.Module())  # reads the model only if no device is given
    except ConversionError as error:
        raise ArtifactError(str(error)) from error
    if place.type == "meta":
        raise ArtifactError("device meta cannot be used: it has no data")
    return place


def _architecture(
    folder: Path,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    model: nn.Module | type[nn.Module] | None,
    trust_source: bool,
) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        try:
            return model()
        except TypeError as error:
            raise ArtifactError(f"{model.__name__} takes arguments ({error}): pass an instance as model=") from error
    if not record.get("recipe"):
        raise ArtifactError(f"{folder} does not say how to build its {record['model']}: pass model=")
    from .. import zoo

    try:
        made = zoo.rebuild(record["recipe"], trust_source, {key: tuple(t.shape) for key, t in tensors.items()})
    except zoo.ZooError as error:
        raise ArtifactError(f"{folder}: {error}") from error
    remember_origin(made, folder)
    return made


def _convert_again(
    model: nn.Module,
    record: dict[str, Any],
    device: torch.device,
    folder: Path,
    on_miss: OnMiss | None,
    graphs: dict[str, Any] | None,
) -> nn.Module:
    """Converts ``model`` in place: with the recorded decisions on the recorded kind of device, with measurements on
    another kind."""
    try:
        calls, parts, statistics = list(record["calls"]), record.get("parts", []), record["statistics"]
        if not calls and not parts:
            leave_as_it_is(model, statistics)
        elif device.type == torch.device(record["device"]).type:
            with only_new_garbage(), given_back_on_error(AsGiven(model, tensors=False)):
                replay(model, device, calls, parts, statistics, on_miss, graphs)
        else:
            inputs = build(_example_of(record), device)
            ModelConverter(config_of(statistics), on_miss=on_miss).convert_model(
                model, device=device, example_inputs=inputs, inplace=True
            )
        return model
    except (ConversionError, InputSpecError) as error:
        raise ArtifactError(f"{folder}: {error}") from error
    except Unstorable as error:
        raise ArtifactError(f"{folder / GRAPHS_FILE} is damaged: {error}") from error
    except Exception as error:  # from the model's code, or a record of another model
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ArtifactError(f"{folder}: its decisions cannot be repeated on this model: {reason}") from error


def _example_of(record: dict[str, Any]) -> Any:
    """Returns the model's inputs as described by ``inputs.described``; None if they are not recorded."""
    calls = record["calls"]
    return calls[0] if calls else record["statistics"].get("example")
