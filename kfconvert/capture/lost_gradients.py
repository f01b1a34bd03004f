"""Finds parameters and arguments of a module whose gradients through its captured graph are wrong.

The graph is traced with gradients disabled. It has the forward operators of a ``torch.autograd.Function``, but not its
backward, and no trace of ``torch.no_grad()``; ``detach()`` is an operator. One run with gradients enabled shows which
tensors lead to an output through such code, whatever the weights are, and whatever a backward would compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..region import Region
from ..runtime import autograd_nodes, memory_of


def lost_gradients(module: nn.Module, region: Region, leaves: list[Any]) -> tuple[frozenset[str], list[Any] | None]:
    """Return the placeholders of ``region`` whose gradients differ between its graph and ``module``, called with the
    flat inputs ``leaves`` as parameters; all differentiable ones, where ``module`` raises with gradients.

    Also return the flat outputs of that call; None where there is none.
    """
    if region.is_random or region.has_caches or region.has_effects or region.communicates or region.shards:
        return frozenset(), None  # compilers get the original forward, see ``runtime.traced``
    held = {name: module.get_submodule(path)._parameters.get(key) for name, (path, key) in region.slots.items()}
    parameters = {name: p for name, p in held.items() if _is_differentiable(p) and not p.is_inference()}
    with torch.inference_mode(False), torch.enable_grad():
        given = [_as_parameter(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = {name: leaf for name, leaf in zip(region.inputs, given) if _is_differentiable(leaf)}
        named = {**parameters, **arguments}
        try:
            with _wanting(named.values()), _nothing_saved():
                with _Losses() as losses:
                    outputs, _ = region.flat_outputs(module, given)
                found = losses.leaves(filter(_is_differentiable, outputs))
        except Exception:  # gradients may be the reason for any error
            return frozenset(named), None
    return frozenset(name for name, tensor in named.items() if id(tensor) in found), outputs


def _as_parameter(leaf: Tensor) -> Tensor:
    """A copy whose class, ``requires_grad`` and ``grad`` differ from a plain tensor's."""
    copied = leaf.detach().clone()
    if not _is_differentiable(copied) or type(leaf) is not Tensor:
        return copied
    parameter = nn.Parameter(copied)
    parameter.grad = torch.zeros_like(copied)
    return parameter


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@contextmanager
def _wanting(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager under which all ``tensors`` require gradients, as frozen parameters may later."""
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    try:
        for tensor in frozen:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def _nothing_saved() -> Any:
    """Context manager under which forwards save no tensors for backward, which is not called."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


class _Losses(TorchFunctionMode):
    """Context manager that records tensors whose gradients differ from their operators': values that were computed or
    written with gradients disabled, and that are inputs of operators with gradients enabled.

    Values that are computed with gradients disabled and not used afterwards, such as scores for an index, are no loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lost: dict[int, Tensor] = {}
        # The sources of tensors computed with gradients disabled; and the memory written in that mode, with a tensor
        # that prevents its reuse.
        self._computed: MutableMapping[Tensor, dict[int, Tensor]] = WeakTensorKeyDictionary()
        self._written: dict[Any, tuple[Tensor, dict[int, Tensor]]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        sources, wanting = self._sources(given), {id(tensor): tensor for tensor in given if tensor.requires_grad}
        recorded = torch.is_grad_enabled()
        if not recorded:
            sources |= wanting
        if not sources:
            return function(*args, **kwargs)
        versions = list(map(_version, given))
        outputs = function(*args, **kwargs)
        computed = list(filter(_is_differentiable, _tensors(outputs)))
        written = [tensor for tensor, version in zip(given, versions) if _version(tensor) != version]
        if not recorded:
            self._computed.update((tensor, sources) for tensor in computed)
            self._written.update((memory_of(tensor), (tensor, sources)) for tensor in written)
        elif computed or written:
            self._lost |= sources
        return outputs

    def leaves(self, outputs: Iterable[Tensor]) -> set[int]:
        """The ids of the autograd leaves with such gradients, for ``outputs`` computed in the context."""
        outputs = list(outputs)
        lost = self._lost | self._sources(outputs)
        functions = filter(_is_function, autograd_nodes(output.grad_fn for output in outputs))
        nodes = autograd_nodes([*functions, *(tensor.grad_fn for tensor in lost.values())])
        return {id(node.variable) for node in nodes if hasattr(node, "variable")} | lost.keys()

    def _sources(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            found |= self._computed.get(tensor, {})
            if self._written and (memory := memory_of(tensor)) in self._written:
                found |= self._written[memory][1]
        return found


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_function(node: Any) -> bool:
    """Whether ``node`` of autograd's graph belongs to a ``torch.autograd.Function``, and not to an operator with
    ``torch.library.register_autograd``, which a captured graph contains."""
    if not isinstance(node, BackwardCFunction):
        return False
    own: Any = type(node)
    return own._forward_cls.__module__ != "torch._library.autograd"
