"""Captures a module as a Region: a flat ATen graph, the live tensors it reads, and the guard it is valid under."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .calls import CallForm
from .guard import Guard, guard_from_placeholders
from .inputs import ExampleCall


class CaptureError(RuntimeError):
    """The module cannot be captured; the message says why in one line."""


@dataclass
class Region:
    """A module captured as one graph.

    ``graph`` has a placeholder for every parameter, buffer, constant and user input, calls ATen operators, and
    returns a flat tuple. ``slots`` tells where the tensor of a placeholder lives in the model: (module path,
    attribute name). ``inputs`` names the placeholders of the user inputs in the order of ``call``'s leaves.
    """

    graph: fx.Graph
    call: CallForm
    guard: Guard
    inputs: list[str]
    slots: dict[str, tuple[str, str]]
    constants: dict[str, Tensor]
    out_spec: pytree.TreeSpec

    def dynamic(self) -> list[str]:
        """The free sizes in words, such as ``input_ids.shape[1]``."""
        words = []
        for places in self.guard.free_sizes().values():
            index, dimension = places[0]
            words.append(f"{self.inputs[index]}.shape[{dimension}]")
        return words


def trace(model: nn.Module, call: ExampleCall, free: Collection[str] = ("batch", "sequence")) -> Region:
    """Capture ``model`` as called in ``call``.

    Args:
        free: the sizes that may vary afterwards: "batch" is dimension 0 of every tensor argument, "sequence"
            dimension 1 of integer tensors (token ids, masks). Image sizes stay fixed: letting them vary makes
            capture take minutes on windowed attention.

    Raises:
        CaptureError: ``torch.export`` refuses the module, or the graph has effects that a region may not have
            (it writes to a buffer, a parameter or an argument).
    """
    try:
        form = CallForm(model.forward, call.args, call.kwargs)
    except ValueError as error:
        raise CaptureError(str(error)) from None
    traced = ExampleCall((), form.arguments)
    batch = _batch_size(traced) if "batch" in free else None
    length = _sequence_length(traced) if "sequence" in free else None
    widened = traced.map_tensors(lambda t: _widen(t, batch, length))
    dynamic = pytree.tree_map(lambda leaf: _free_dimensions(leaf, batch, length), traced.kwargs)
    program = _export(model, widened.kwargs, dynamic)
    return _region(program, form)


def _batch_size(call: ExampleCall) -> int | None:
    sizes = {t.shape[0] for t in call.tensors() if t.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def _sequence_length(call: ExampleCall) -> int | None:
    lengths = {t.shape[1] for t in call.tensors() if _holds_tokens(t)}
    return lengths.pop() if len(lengths) == 1 else None


def _holds_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _free_dimensions(leaf: Any, batch: int | None, length: int | None) -> dict[int, Any] | None:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    free = {0: Dim.AUTO} if batch is not None else {}
    if length is not None and _holds_tokens(leaf):
        free[1] = Dim.AUTO
    return free or None


def _widen(tensor: Tensor, batch: int | None, length: int | None) -> Tensor:
    """Free sizes of 1 become 2: the exporter takes a size of 1 for a constant."""
    if batch == 1 and tensor.dim() > 0:
        tensor = torch.cat([tensor, tensor])
    if length == 1 and _holds_tokens(tensor):
        tensor = torch.cat([tensor, tensor], dim=1)
    return tensor


@contextmanager
def _quiet():
    """The exporter logs and warns about what is reported here in one line of our own."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _export(model: nn.Module, kwargs: dict[str, Any], dynamic: dict[str, Any]) -> ExportedProgram:
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(model, (), kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # the exporter raises anything the model's own code may raise
        line = next((text for text in str(error).splitlines() if text.strip()), "")
        raise CaptureError(f"torch.export: {type(error).__name__}: {line.strip()[:300]}") from error


def _region(program: ExportedProgram, form: CallForm) -> Region:
    signature = program.graph_signature
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    slots, constants, inputs, values = {}, {}, [], []
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path, _, attribute = spec.target.rpartition(".")
            slots[name] = (path, attribute)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[name] = program.constants[spec.target]
        elif spec.kind is InputKind.USER_INPUT:
            inputs.append(name)
            values.append(placeholders[name].meta.get("val", getattr(spec.arg, "value", None)))
        else:
            raise CaptureError(f"the graph takes a {spec.kind.name.lower()} argument")
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(f"the forward has a side effect: {spec.kind.name.lower()} {spec.target}")
    try:
        guard = guard_from_placeholders(values)
    except ValueError as error:
        raise CaptureError(str(error)) from None
    return Region(program.graph, form, guard, inputs, slots, constants, program.call_spec.out_spec)
