"""Cached graphs from earlier conversions of an equal model, so that a conversion need not trace it again.

A file has the graphs of a model's calls, and their evidence. A conversion uses them if the model, its code and its call
are the same as at the trace, and each graph still computes the outputs of the model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import folders
from ..capture import (
    Capture,
    checked_code,
    evidence_of_regions,
    named_classes,
    rebuilt_region,
    recaptured,
    stored_region,
)
from ..inputs import ClassName, ExampleCall, Unstorable, class_name, taken_apart
from ..known_libraries import LIBRARIES, is_of_libraries
from ..process import is_one_of_several
from ..region import CaptureError, Region, store_graph
from ..runtime import NoEvidence, configurations, library_switches, plain_text
from ..settings import cache_folder
from ..torch_state import is_dense
from ..version import __version__
from .preparation import Prepared

_LOG = logging.getLogger(__name__)
# Shorter traces are not stored, and the oldest files are removed first.
LEAST_SECONDS, MOST_FILES = 1.0, 32
_FEW = 4  # entries in each dimension of a tensor, by which it is known to have equal values


class RememberedGraphs:
    """Captures of calls of a model that is not converted yet, by these calls.

    Files are replaced atomically. A damaged, unreadable or unwritable file counts as missing. The environment variable
    ``KFCONVERT_CACHE`` sets the folder, or disables the cache.

    Args:
        options: the options of the conversion that decide which calls are captured.
    """

    def __init__(self, prepared: Prepared, options: str):
        self._prepared, self._model = prepared, prepared.model
        #: The captures that needed no trace, and the seconds of processor time that the traces of the model took.
        self.found, self.seconds = 0, 0.0
        self._regions: dict[str, Region] = {}
        self._stored: dict[str, dict[str, Any]] = {}
        self._taken: dict[str, dict[str, Any]] = {}
        self._asked: dict[int, tuple[ExampleCall, str]] = {}
        self._path: Path | None = None
        folder = cache_folder()
        if folder is None or is_one_of_several():  # all ranks must run the same graphs
            return
        if not is_of_libraries(self._model):  # other code may read values that the evidence does not have
            return
        try:
            facts = "\n".join((*_facts(self._model), _described(prepared.call), str(prepared.device), options))
            digest = hashlib.sha256(facts.encode(errors="surrogatepass")).hexdigest()
            self._path = folder / f"graphs-{digest[:16]}.json"
            self._read(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            pass
        except Exception as error:  # from the values of the file, or code of the model
            self._regions = {}
            _LOG.debug("no cached graphs are used: %s: %s", type(error).__name__, error)

    def _read(self, content: dict[str, Any]) -> None:
        classes = named_classes(self._model)
        for key, stored in content["graphs"].items():
            self._regions[key] = rebuilt_region(self._model, self._prepared.device, stored, classes)[1]
        if self._evidence(self._regions.values()) != content["evidence"]:
            raise ValueError("the model, its code or the libraries changed")
        self.seconds, self._stored = float(content["seconds"]), content["graphs"]

    def known(self, call: ExampleCall, example: ExampleCall) -> Capture | None:
        """Returns the capture of ``call`` whose inputs are those of ``example``; None if the call must be traced."""
        if self._path is None:
            return None
        try:
            texts = len(self._asked), _described(call), _described(example)
            key = hashlib.sha256(repr(texts).encode(errors="surrogatepass")).hexdigest()
            self._asked[id(call)] = call, key
            region = self._regions.get(key)
            if region is None:
                return None
            captured = recaptured(self._model, "", region, region.call.leaves(example.args, example.kwargs))
            if checked_code(captured) != self._stored[key]["ran"]:
                raise ValueError("the model runs other code")
        except Exception as error:  # the call is traced instead
            _LOG.debug("a cached graph is not used: %s: %s", type(error).__name__, error)
            return None
        self.found += 1
        self._taken[key] = self._stored[key]
        return captured

    def save(self, captures: Iterable[tuple[ExampleCall, Capture | CaptureError]], seconds: float) -> None:
        """Stores the graphs of ``captures``, whose traces took ``seconds`` of processor time, for later conversions."""
        if self._path is None or seconds < LEAST_SECONDS:
            return
        classes, found, regions = named_classes(self._model), dict(self._taken), list[Region]()
        for call, captured in captures:
            if not isinstance(captured, Capture) or id(call) not in self._asked:
                continue
            key = self._asked[id(call)][1]
            if key not in found and (stored := self._made(captured, classes)) is not None:
                found[key] = stored
            if key in found:
                regions.append(captured.region)
        if len(found) == len(self._taken):
            return
        self._prepared.own_state.resettle()
        try:
            _write(self._path, {"evidence": self._evidence(regions), "seconds": seconds, "graphs": found})
        except (NoEvidence, OSError) as reason:  # such as a read-only folder: the next conversion traces again
            _LOG.debug("the graphs of %s are not stored: %s", type(self._model).__name__, reason)

    def _evidence(self, regions: Iterable[Region]) -> str:
        return evidence_of_regions(self._model, ((region, [""]) for region in regions))

    def _made(self, captured: Capture, classes: dict[ClassName, type]) -> dict[str, Any] | None:
        """Returns the stored form of a traced capture; None if no later conversion could use it."""
        if captured.region.has_fixed_layouts:
            return None
        store_graph(captured.region)
        stored = stored_region(self._model, self._prepared.device, captured.region, [""], classes)
        try:
            return stored and {**stored, "ran": checked_code(captured)}
        except CaptureError:
            return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file at ``path``, and removes the oldest files of its folder."""
    with folders.replacing(path.parent) as partial:
        (partial / path.name).write_text(json.dumps(content, allow_nan=False))
    for old in sorted(path.parent.glob("graphs-*.json"), key=lambda file: file.stat().st_mtime)[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def _facts(model: nn.Module) -> Iterator[str]:
    """Everything about the model and the process that is known before a trace."""
    versions = (getattr(sys.modules.get(name), "__version__", "") for name in LIBRARIES)
    yield f"{class_name(type(model))} {__version__} {_own_code()} {[*versions]} {library_switches()}"
    yield from (f"{name} {_kind(tensor)}" for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    yield from (f"{class_name(type(each))} {plain_text(vars(each))}" for each in configurations(model))


@functools.cache
def _own_code() -> str:
    """Returns a digest of the Python files of this package."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"\n".join(file.read_bytes() for file in files)).hexdigest()


def _described(call: ExampleCall) -> str:
    """Returns the arguments of ``call``. Raises Unstorable if a graph may depend on more."""
    leaves, form = taken_apart((call.args, call.kwargs))
    places = [next(place for place, each in enumerate(leaves) if each is leaf) for leaf in leaves]
    texts = [_kind(leaf) if isinstance(leaf, Tensor) else plain_text(leaf) for leaf in leaves]
    if not all(texts):
        raise Unstorable("its call has an argument of an unknown kind")
    return f"{form} {places} {texts}"


def _kind(tensor: Tensor) -> str:
    """Describes ``tensor`` without its values, except for equal ones: for a model with weights of 0, or for inputs of
    0, trial runs of other calls may agree by chance. Token ids count as different, as they may depend on weights."""
    kind = f"{class_name(type(tensor))} {tensor.dtype} {tensor.shape} {tensor.device} {tensor.requires_grad}"
    if not is_dense(tensor) or tensor.is_meta:
        raise Unstorable(f"it has a tensor of the kind {kind}")
    values = set(tensor.detach()[(slice(_FEW),) * tensor.dim()].flatten().tolist())
    equal = len(values) == 1 and (tensor.is_floating_point() or values <= {0, 1})
    return f"{kind} {tensor.stride()} {values if equal else ''}"
