"""Tensors of a model that no program reads, in host memory."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..recording.merged_weights import exchange, is_alone
from ..recording.program import Program

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class OnHost:
    """Parameters and buffers that stay the same objects while their elements are stored on ``host``.

    Deep copies and pickles of this are None: they move the copied tensors to the device of the copy of ``anchor``, a
    tensor of the model that was not moved.
    """

    def __init__(self, tensors: list[Tensor], anchor: Tensor, host: torch.device):
        self.bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        self._tensors, self._anchor, self._lock = tensors, anchor, threading.Lock()
        if anchor.is_cuda:
            torch.cuda.synchronize(anchor.device)  # calls on other streams may still read them
        _move(tensors, host)

    def holds(self, tensor: Tensor) -> bool:
        return any(each is tensor for each in self._tensors)

    def bring_back(self) -> bool:
        """Whether this call has moved the tensors back; concurrent calls wait until that is done."""
        with self._lock:
            tensors, self._tensors = self._tensors, []
            _move(tensors, self._anchor.device)
            self.bytes = 0
            return bool(tensors)

    def __reduce__(self):
        return _brought_back, (list(self._tensors), self._anchor)


def _brought_back(tensors: list[Tensor], anchor: Tensor) -> None:
    _move(tensors, anchor.device)


def _move(tensors: list[Tensor], device: torch.device) -> None:
    # Tensors created under inference_mode cannot be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        values = [tensor.detach().to(device, copy=True) for tensor in tensors]
        if values:
            exchange(tensors, values)


def anchor_of(model: nn.Module) -> Tensor | None:
    """The tensor by which users and libraries determine the device of ``model``; None where it has no tensor."""
    return next(chain(model.parameters(), model.buffers()), None)


def only_of_original(model: nn.Module, programs: Iterable[Program]) -> list[Tensor]:
    """The parameters and buffers of ``model`` that none of the frozen ``programs``, which serve it, reads directly.

    The first tensor is excluded, as it determines the model's device. Tensors are also excluded that share memory, have
    gradients, are on another device, or have a special type.
    """
    anchor = anchor_of(model)
    plans = [(program, each) for program in programs for each in program.kept_plans()]
    read = list(chain.from_iterable(program.read_by_code() for program, _ in plans))
    read += tensors_within([vars(each) for _, each in plans])
    spans = [span for tensor in read if (span := _span(tensor)) is not None]
    found = dict.fromkeys(chain(model.parameters(), model.buffers()))
    return [
        tensor
        for tensor in found
        if tensor is not anchor
        and anchor is not None
        and tensor.device == anchor.device
        and _may_move(tensor)
        and not any(_overlap(span, _span(tensor)) for span in spans)
    ]


def _may_move(tensor: Tensor) -> bool:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_inference()
    return plain and tensor.numel() > 0 and tensor.grad is None and not tensor.is_neg() and is_alone(tensor)


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """The start and end address of a tensor's memory; None where it has no memory, as packed weights."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return None


def _overlap(one: tuple[int, int], other: tuple[int, int] | None) -> bool:
    return other is not None and one[0] < other[1] and other[0] < one[1]


def tensors_within(values: Iterable[Any]) -> list[Tensor]:
    """The distinct tensors that ``values`` hold: in containers, in closures and defaults of functions, in their bound
    objects, in modules, and in attributes of this package's objects, such as plans."""
    found: dict[int, Any] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) not in found:
            found[id(value)] = value
            pending += _held_by(value)
    return [value for value in found.values() if isinstance(value, Tensor)]


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, (Tensor, type)):
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return [value.__defaults__, value.__kwdefaults__, *_closure(value)]
    if isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] == __name__.partition(".")[0]:
        slots = chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return []


def _closure(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
