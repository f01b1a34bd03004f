"""Operators that a trace has met before, on tensors of the same shapes: their results are made anew from what is known.

The tracer works out the result of every call of an operator: it decomposes the operator, and asks for the contiguity
of every intermediate value, with arithmetic on free sizes. The calls in the layers of a model are alike, so that this
is worked out for the first layer, and remembered for the others. What is asked about sizes in it is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._C import _functorch, _get_dispatch_mode, _TorchDispatchModeKey
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..process import ThisThread, replaced

# Operators with one of these tags have results that do not follow from shapes, or change their arguments' shapes.
_UNKNOWN = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
# They are given tensors that hold values for the tracer.
_LIFTING = frozenset(("aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"))
# Values that are what they are, whatever is traced.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """A call, or its result, that is not remembered."""


@dataclass(frozen=True)
class _Made:
    """A tensor of a result: a new one (``base`` is None), or a view of the argument ``base``.

    ``sizes`` are its shape, strides and offset: numbers, sizes of arguments by their index, or expressions with the
    values that they have in this trace."""

    base: int | None
    dtype: torch.dtype
    device: torch.device
    dimensions: int
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class _Size:
    """A size of an argument, by its index among all free sizes in a call."""

    index: int


@contextmanager
def known_operators() -> Iterator[None]:
    """Within the block, the results of operators that are traced in this thread are remembered."""
    known, here = _Known(), ThisThread()
    trace, call = proxy_tensor.proxy_call, OpOverload.__call__

    def traced(mode: Any, operator: Any, *rest: Any) -> Any:
        if not here:
            return trace(mode, operator, *rest)
        known.awaited = operator
        try:
            return trace(mode, operator, *rest)
        finally:
            known.awaited = None

    def called(self: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        # The tracer records an operator, then calls it for its result.
        if known.awaited is not self or not here or proxy_tensor.get_proxy_mode() is not None:
            return call(self, *args, **kwargs)
        known.awaited = None
        return known.result(call, self, args, kwargs)

    try:
        with replaced([(proxy_tensor, "proxy_call", traced), (OpOverload, "__call__", called)]):
            yield
    finally:
        here.over = True


class _Known:
    """The results by what determines them. ``awaited`` is the operator that the tracer is about to call."""

    def __init__(self) -> None:
        self.awaited: Any = None
        self._results: dict[tuple[Any, ...], Any] = {}

    def result(
        self, call: Callable[..., Any], operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What ``call`` returns for the ``operator`` and its arguments."""
        try:
            given = _Given(operator, args, kwargs)
        except _Unknown:
            return call(operator, *args, **kwargs)
        found = self._results.get(given.key)
        if found is not None:
            return given.made(found)
        result = call(operator, *args, **kwargs)
        try:
            self._results[given.key] = given.recipe(result)
        except _Unknown:  # the next such call is looked at again
            pass
        return result


class _Given:
    """The arguments of a call: ``key`` is all of them that its result depends on."""

    def __init__(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._tensors: list[FakeTensor] = []
        self._sizes: list[SymInt] = []
        if not _is_remembered(operator) or not _is_usual():
            raise _Unknown
        key: list[Any] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        self._note(args, key)
        for name in sorted(kwargs):
            key.append(name)
            self._note(kwargs[name], key)
        # The tracer computes with constants alone, and goes by their values; beside others they are tensors like these.
        if all(tensor.constant is not None for tensor in self._tensors):
            raise _Unknown
        self.key = tuple(key)
        self._mode: FakeTensorMode = self._tensors[0].fake_mode
        if self._mode.in_kernel_invocation or any(each.fake_mode is not self._mode for each in self._tensors):
            raise _Unknown

    def _note(self, value: Any, key: list[Any]) -> None:
        """Put down in ``key`` what of ``value`` counts."""
        kind = type(value)
        if kind is FakeTensor:
            _check(value)
            self._tensors.append(value)
            key += (kind, value.constant is None, value.dtype, value.device, value.requires_grad, value.dim())
            for size in _sizes(value):
                self._note(size, key)
        elif kind is SymInt:
            self._sizes.append(value)
            key += (kind, value.node.expr)
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind in (list, tuple):
            key += (kind, len(value))
            for each in value:
                self._note(each, key)
        else:
            raise _Unknown

    def recipe(self, result: Any) -> Any:
        """How to make another ``result`` of such a call."""
        if type(result) in (list, tuple):
            storages = [_storage(each) for each in result if isinstance(each, Tensor)]
            recipes = [self.recipe(each) for each in result]
            if len(set(storages)) < len(storages) and any(isinstance(r, _Made) and r.base is None for r in recipes):
                raise _Unknown
            return type(result)(recipes)
        if type(result) is not FakeTensor or result.fake_mode is not self._mode or free_unbacked_symbols(result):
            raise _Unknown
        _check(result)
        if result.constant is not None or result.requires_grad:
            raise _Unknown
        bases = [index for index, each in enumerate(self._tensors) if _storage(each) == _storage(result)]
        if len(bases) > 1:
            raise _Unknown
        if bases and result is self._tensors[bases[0]]:
            return bases[0]
        indices = {id(size.node): index for index, size in enumerate(self._sizes)}
        sizes = tuple(_recipe_of_size(size, indices) for size in _sizes(result))
        return _Made(bases[0] if bases else None, result.dtype, result.device, result.dim(), sizes)

    def made(self, recipe: Any) -> Any:
        """A result by its ``recipe``."""
        if isinstance(recipe, int):
            return self._tensors[recipe]
        if not isinstance(recipe, _Made):
            return type(recipe)(map(self.made, recipe))
        environment = self._mode.shape_env
        sizes = [self._size(size, environment) for size in recipe.sizes]
        shape, strides, offset = sizes[: recipe.dimensions], sizes[recipe.dimensions : -1], sizes[-1]
        # As the tracer does it: nothing new is asked about sizes.
        with in_kernel_invocation_manager(self._mode), environment.suppress_guards():
            made = torch.empty_strided(shape, strides, dtype=recipe.dtype, device="meta")
            if recipe.base is not None:
                made.set_(self._tensors[recipe.base].untyped_storage(), offset, shape, strides)
        return FakeTensor(self._mode, made, recipe.device)

    def _size(self, size: Any, environment: Any) -> Any:
        if isinstance(size, _Size):
            return self._sizes[size.index]
        if isinstance(size, int):
            return size
        expression, value = size
        return SymInt(SymNode(expression, environment, int, value))


def _is_remembered(operator: OpOverload) -> bool:
    schema = operator._schema
    if operator.namespace != "aten" or schema.is_mutable or schema.name in _LIFTING:
        return False
    return not any(tag in operator.tags for tag in _UNKNOWN)


def _is_usual() -> bool:
    """Whether results depend on arguments alone: the tracer's own mode is the only one."""
    modes = torch._C._len_torch_dispatch_stack() - (_get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None)
    return not (
        modes
        or torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or _functorch.peek_interpreter_stack() is not None
    )


def _check(tensor: FakeTensor) -> None:
    """Raises _Unknown for a tensor of which more counts than its dtype, device and strides."""
    if tensor.real_tensor is not None or tensor.layout is not torch.strided:
        raise _Unknown
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.is_quantized:
        raise _Unknown


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _recipe_of_size(size: Any, indices: dict[int, int]) -> Any:
    if not isinstance(size, SymInt):
        return size
    if id(size.node) in indices:
        return _Size(indices[id(size.node)])
    return size.node.expr, size.node.hint
