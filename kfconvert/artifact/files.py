"""Converted models on disk: ``model.safetensors`` with the original's keys, ``kfconvert.json``, ``report.html``.

``load`` rebuilds the architecture, loads the weights, and converts again with the recorded decisions, without timing.
Results that a conversion derives (folded BatchNorms, packed weights, programs) are not stored.
Nothing is pickled, and code named in an artifact runs only with the caller's permission.
"""

from __future__ import annotations

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import folders
from ..conversion import (
    AsGiven,
    ConversionError,
    Request,
    check_callback,
    check_thread,
    convert,
    first_line,
    given_back_on_error,
    leave_as_it_is,
    resolve_device,
)
from ..inputs import InputSpecError, build
from ..own_patterns import PatternError, rebuilt
from ..patterns import only_own
from ..process import garbage_collected_once, level_outside, one_at_a_time
from ..runtime import OnMiss
from .companions import remember_origin
from .errors import ArtifactError, reading
from .pretrained import extend_save_pretrained
from .quantized import unflattened
from .record import read_checked, read_json, read_record
from .replay import config_of, replay
from .schema import BUFFERS_FILE, GRAPHS_FILE, weights_files
from .tensor_files import read_tensors
from .weights import fill, fill_buffers


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
    record = read_record(folder)
    _check_trust(folder, record, trust_source)
    graphs = read_checked(folder, record, GRAPHS_FILE, read_json) if GRAPHS_FILE in record["files"] else None
    place = _device(record, device)
    with one_at_a_time():  # libraries set global state, such as the default dtype, when they build a model
        made = _original(folder, record, model, trust_source, place)
        try:
            patterns = [rebuilt(own) for own in record["statistics"].get("own_patterns", [])]
        except PatternError as error:
            raise ArtifactError(f"{folder}: {error}") from error
        with only_own(patterns):
            return _convert_again(made, record, place, folder, on_miss, graphs)


def load_original(
    path: str | os.PathLike, device: torch.device | str | None = None, trust_source: bool = False
) -> tuple[nn.Module, Any]:
    """Returns the original model of the artifact in the folder ``path``, in eval mode on the device that ``load`` would
    choose, and example inputs for ``ModelConverter.convert_model`` on that device.

    Raises:
        ArtifactError: see ``load``; or the artifact does not record its inputs.
    """
    folder = folders.expanded(path)
    record = read_record(folder)
    _check_trust(folder, record, trust_source)
    place = _device(record, device)
    with one_at_a_time():
        made = _original(folder, record, None, trust_source, place)
    try:
        return made, build(_example_of(record), place)
    except InputSpecError as error:
        raise ArtifactError(f"{folder} does not say which inputs its model takes: {error}") from error


def _original(
    folder: Path,
    record: dict[str, Any],
    model: nn.Module | type[nn.Module] | None,
    trust_source: bool,
    device: torch.device,
) -> nn.Module:
    """Returns the original model with its weights in eval mode on ``device``."""
    tensors, metadata, quantized = dict[str, Tensor](), dict[str, str](), record.get("quantized", {})
    for file in weights_files(record["files"]):
        found, described = read_checked(folder, record, file, read_tensors)
        tensors |= found
        metadata |= described
    with reading(folder):
        tensors = unflattened(tensors, metadata, quantized, device)
    # Without a checksum, a file of this name belongs to another artifact.
    with_buffers = BUFFERS_FILE in record["files"]
    buffers = read_checked(folder, record, BUFFERS_FILE, load_file) if with_buffers else {}
    made = _architecture(folder, record, model, trust_source)
    name = next((name for name, t in chain(made.named_parameters(), made.named_buffers()) if t.is_meta), None)
    if name is not None:
        raise ArtifactError(f"{folder}: the model is on the device meta, where {name} has no data to fill")
    fill(made, tensors, record["state_metadata"], folder, device)
    fill_buffers(made, buffers)
    return made.to(device).eval()


def _check_trust(folder: Path, record: dict[str, Any], trust_source: bool) -> None:
    """Raises ArtifactError if the artifact contains a user's functions, unless the caller trusts them."""
    for own in record["statistics"].get("own_patterns", []) if not trust_source else ():
        raise ArtifactError(
            f"{folder}: its pattern {own['name']!r} runs the function {own['replacement']} in place of "
            f"{own['reference']}: pass trust_source=True if you trust that code"
        )


def _device(record: dict[str, Any], device: torch.device | str | None) -> torch.device:
    if device is None:
        device = str(record["device"])
        if device.startswith("cuda") and not torch.cuda.is_available():
            warnings.warn(
                "the model was converted for a CUDA GPU, which is not available, so load converts it for the CPU",
                stacklevel=level_outside(),
            )
            return torch.device("cpu")
    try:
        return resolve_device(device, nn.Module())  # reads the model only if no device is given
    except ConversionError as error:
        raise ArtifactError(str(error)) from error


def _architecture(
    folder: Path, record: dict[str, Any], model: nn.Module | type[nn.Module] | None, trust_source: bool
) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        if not callable(model):
            raise ArtifactError(f"model= takes a module or a class of modules, not {type(model).__name__}")
        try:
            return model()
        except TypeError as error:
            raise ArtifactError(f"{model.__name__} takes arguments ({error}): pass an instance as model=") from error
    if not record.get("recipe"):
        raise ArtifactError(f"{folder} does not say how to build its {record['model']}: pass model=")
    from .. import zoo

    try:
        made = zoo.rebuild(record["recipe"], trust_source)
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
        calls, parts, statistics = list(record["calls"]), record["parts"], record["statistics"]
        if not calls and not parts:
            leave_as_it_is(model, statistics, on_miss)
        elif device.type == torch.device(record["device"]).type:
            with garbage_collected_once(), given_back_on_error(AsGiven(model, tensors=False)):
                replay(model, device, calls, parts, statistics, on_miss, graphs)
        else:
            request = Request(device=device, example_inputs=build(_example_of(record), device), inplace=True)
            convert(model, request, config_of(statistics), on_miss=on_miss)
        extend_save_pretrained(model)
        return model
    except (ConversionError, InputSpecError) as error:
        raise ArtifactError(f"{folder}: {error}") from error
    except Exception as error:  # from the model's code, or a record of another model
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ArtifactError(f"{folder}: its decisions cannot be repeated on this model: {reason}") from error


def _example_of(record: dict[str, Any]) -> Any:
    """Returns the model's inputs as described by ``inputs.described``; None if they are not recorded."""
    calls = record["calls"]
    return calls[0] if calls else record["statistics"].get("example")
