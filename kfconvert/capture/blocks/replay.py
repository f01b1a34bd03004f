"""Blocks of one structure are traced once: the others repeat the graph nodes that were recorded for the first."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ...region import Read
from ...runtime import has_hooks
from .structure import attribute_values, by_integers, contents, groups, is_operator, unread
from .traced_call import Recording

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# One attempt finds at most one integer attribute that the forward uses.
_ATTEMPTS = 4
# The first call may compute sizes of the model's inputs, which later ones only read.
_RECORDINGS = 2


class Repetition:
    """The blocks of ``model`` that have one structure, for every trace of it or of a part of it."""

    def __init__(self, model: nn.Module):
        blocks = [m for m in model.modules() if m is not model and not is_operator(m) and "forward" not in vars(m)]
        self._groups = [group for group in groups(blocks, also=lambda module: None) if len(group) > 1]
        self._used: set[str] = set()
        self.recordings: list[Recording] = []  # the calls of blocks that were traced
        self.reads: set[Read] = set()  # the names that the trace at hand has read from configurations so far
        self.replayed = 0  # calls, in the last trace
        self.interfered = False  # whether the last trace differs from a plain one in any way

    def trace(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """``run()``, which traces ``module`` with fake tensors; calls of its blocks are replayed where possible.

        Blocks that differ in an integer attribute are alike only if the forward does not use it; where it does, the
        trace starts anew, with the blocks told apart by it.
        """
        inner = set(module.modules()) - {module}
        for _ in range(_ATTEMPTS):
            used: set[str] = set()
            known = len(self.recordings)
            told_apart = [blocks for group in self._groups for blocks in by_integers(group, self._used)]
            within = [[block for block in blocks if block in inner] for blocks in told_apart]
            alike = [blocks for blocks in within if len(blocks) > 1]
            self.interfered = bool(alike)
            try:
                with unread(alike, used.add), self._replaying(within):
                    result = run()
                if not used:
                    return result
            except Exception as error:
                if _is_own(error):
                    # What is recorded here is no public interface of PyTorch: another version may have another one.
                    self._groups = []
                elif not used:
                    raise
            self._used |= used
            del self.recordings[known:]
        self.replayed, self.interfered = 0, False
        return run()

    @contextmanager
    def _replaying(self, alike: Iterable[list[nn.Module]]) -> Iterator[None]:
        """Within the block, the forward of each of the modules records its first call, or replays that of another."""
        self.replayed = 0
        changed = []
        try:
            for group in alike:
                records: dict[Hashable, tuple[_Record | None, int]] = {}
                for module in group:
                    vars(module)["forward"] = self._forward(module, module.forward, records)
                    changed.append(module)
            yield
        finally:
            for module in changed:
                del vars(module)["forward"]

    def _forward(
        self, module: nn.Module, forward: Callable[..., Any], records: dict[Hashable, tuple[_Record | None, int]]
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            mode = proxy_tensor.get_proxy_mode()
            call = None if mode is None else _Call.of(mode.tracer, module, args, kwargs)
            if call is None:
                return forward(*args, **kwargs)
            known, refusals = records.get(call.key, (None, 0))
            if known is not None:
                self.replayed += 1
                self.reads |= known.reads
                return known.replay(call)
            if refusals == _RECORDINGS:
                return forward(*args, **kwargs)
            last = next(iter(reversed(call.tracer.graph.nodes)))
            before = _attributes(module)
            with self._reads_within() as reads:
                result = forward(*args, **kwargs)
            unchanged = _attributes(module) == before and call == _Call.of(call.tracer, module, args, kwargs)
            record = _Record.of(call, last, result, frozenset(reads)) if unchanged else None
            records[call.key] = (record, refusals + 1)
            recording = record and record.kept((args, kwargs))
            if recording is not None:
                self.recordings.append(recording)
            return result

        return recorded

    @contextmanager
    def _reads_within(self) -> Iterator[set[Read]]:
        """The set that is yielded holds, afterwards, the names that were read within the block."""
        before = set(self.reads)
        within: set[Read] = set()
        self.reads.clear()
        try:
            yield within
        finally:
            within |= self.reads
            self.reads |= before


@dataclass(frozen=True)
class _Call:
    """A call of a block while it is traced.

    ``arguments`` and ``state`` are the graph nodes of the tensors that it receives and of its own, in order; ``key``
    is equal for calls of which one can repeat the graph nodes of the other.
    """

    tracer: Any
    module: nn.Module
    leaves: tuple[Any, ...]
    arguments: tuple[fx.Node | None, ...]
    state: tuple[fx.Node, ...]
    key: Hashable

    @classmethod
    def of(cls, tracer: Any, module: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """None for a call that is not only about tensors and constants, or of a module with hooks inside."""
        if any(has_hooks(inner) for inner in module.modules()):
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda value: type(value) not in (tuple, list, dict))
        described = [_described(leaf) for leaf in leaves]
        if any(description is None for description in described):
            return None
        if any(_is_known(tracer, leaf) for leaf in leaves if isinstance(leaf, Tensor)):
            return None
        nodes = [_node(tracer, leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        state = [_node(tracer, tensor) for *_, tensor in _state(module)]
        traced = [node for node, leaf in zip(nodes, leaves) if isinstance(leaf, Tensor)]
        if None in traced or None in state or not set(traced).isdisjoint(state):
            return None
        ties = tuple(map([*traced, *state].index, [*traced, *state]))
        autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        modes = (torch.is_grad_enabled(), torch.get_default_dtype(), *autocast)
        key = (id(tracer.graph), str(spec), tuple(described), ties, modes, attribute_values(module))
        return cls(tracer, module, tuple(leaves), tuple(nodes), tuple(state), key)

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _Call)
            and (self.key, self.arguments, self.state) == (other.key, other.arguments, other.state)
            and all(mine is yours for mine, yours in zip(self.leaves, other.leaves))
        )


@dataclass(frozen=True)
class _Record:
    """The graph nodes of one call, and what it returned, with the nodes of the tensors; see ``replay``."""

    call: _Call
    nodes: tuple[fx.Node, ...]
    outputs: tuple[tuple[Any, fx.Node | None], ...]
    spec: pytree.TreeSpec
    reads: frozenset[Read]  # what it has read from configurations

    @classmethod
    def of(cls, call: _Call, last: fx.Node, result: Any, reads: frozenset[Read]) -> _Record | None:
        """The record of ``call``, which returned ``result``; ``last`` is the graph node before it.

        None where its nodes read more than its arguments, its own tensors, sizes and constants, where the sizes depend
        on data, and where it returns more than new tensors, its arguments and constants.
        """
        nodes, node = [], last.next
        while node.op != "root":
            nodes.append(node)
            node = node.next
        known = {*nodes, *call.arguments, *call.state}
        outer = {value for node in nodes for value in node.all_input_nodes} - known
        if not all(node.op == "get_attr" or isinstance(node.meta.get("val"), _SYMBOLIC) for node in outer):
            return None
        if any(_depends_on_data(node.meta.get("val")) for node in nodes):
            return None
        results, spec = pytree.tree_flatten(result)
        outputs = [(r, _node(call.tracer, r) if isinstance(r, Tensor) else None) for r in results]
        for output, source in outputs:
            if isinstance(output, Tensor) and not _is_among(output, call.leaves):
                if not isinstance(output, FakeTensor) or source not in nodes or output.storage_offset() != 0:
                    return None
            elif not isinstance(output, (Tensor, *_CONSTANTS, *_SYMBOLIC)):
                return None
        return cls(call, tuple(nodes), tuple(outputs), spec, reads)

    def kept(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Recording | None:
        """What outlives the trace, where the call returned no sizes."""
        call = self.call
        if any(isinstance(value, _SYMBOLIC) for value, _ in self.outputs):
            return None
        of_tensor = {id(leaf): node for leaf, node in zip(call.leaves, call.arguments) if node is not None}
        outputs = [value if node is None else node for value, node in self.outputs]
        path = call.tracer.path_of_module(call.module)
        state = {(inner, name): node for (inner, name, _), node in zip(_state(call.module), call.state)}
        known = (call.module, path, arguments, self.reads)
        return Recording.of(*known, of_tensor, state, self.nodes, outputs, self.spec)

    def replay(self, call: _Call) -> Any:
        """Append the same nodes for another call; what it returns has the sizes of what this one returned."""
        tracer, copies = call.tracer, {}
        for mine, yours in zip((*self.call.arguments, *self.call.state), (*call.arguments, *call.state)):
            copies[mine] = yours
        path, moved = tracer.path_of_module(self.call.module), tracer.path_of_module(call.module)
        for node in self.nodes:
            copies[node] = tracer.graph.node_copy(node, lambda value: copies.get(value, value))
            stack = node.meta.get("nn_module_stack")
            if stack is not None:
                copies[node].meta["nn_module_stack"] = _moved(stack, path, moved)
        return pytree.tree_unflatten([self._output(*output, call, copies) for output in self.outputs], self.spec)

    def _output(self, output: Any, node: fx.Node | None, call: _Call, copies: dict[fx.Node, fx.Node]) -> Any:
        if not isinstance(output, Tensor):
            return output
        for mine, yours in zip(self.call.leaves, call.leaves):
            if mine is output:
                return yours
        assert isinstance(output, FakeTensor)  # ``of`` takes no other that is not among the leaves
        with proxy_tensor.disable_proxy_modes_tracing(), output.fake_mode:
            fake = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
        proxy_tensor.track_tensor(fake, fx.Proxy(copies[node], call.tracer), constant=None, tracer=call.tracer)
        return fake


def _is_own(error: Exception) -> bool:
    """Whether ``error`` comes from the bookkeeping in this file, not from the model."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == __file__


def _node(tracer: Any, tensor: Tensor) -> fx.Node | None:
    proxy = tracer.unwrap_proxy(tensor)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _is_known(tracer: Any, tensor: Tensor) -> bool:
    """Whether the trace knows the values of ``tensor``, which the model may ask for."""
    slot = proxy_tensor.get_proxy_slot(tensor, tracer, None, lambda found: found)
    return slot is not None and slot.constant is not None


def _state(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(module path, attribute name, tensor) of each parameter and buffer."""
    for path, inner in module.named_modules():
        for store in (inner._parameters, inner._buffers):
            yield from ((path, name, tensor) for name, tensor in store.items() if tensor is not None)


def _attributes(module: nn.Module) -> tuple[list[tuple[str, int]], dict[int, tuple[int, ...]]]:
    """What a forward that keeps something for later changes: which values stand there, and in lists and objects."""
    stores = [store for inner in module.modules() for store in (vars(inner), inner._buffers, inner._parameters)]
    distinct = {id(value): value for store in stores for value in store.values()}
    within = {place: tuple(map(id, contents(value))) for place, value in distinct.items()}
    return [(name, id(value)) for store in stores for name, value in store.items()], within


def _described(leaf: Any) -> Hashable:
    """A constant with its type, or what the sizes, strides and dtype of a fake tensor are; None for others."""
    if isinstance(leaf, Tensor):
        if not isinstance(leaf, FakeTensor):
            return None
        return str(leaf.shape), str(leaf.stride()), str(leaf.storage_offset()), leaf.dtype, leaf.device
    if isinstance(leaf, _SYMBOLIC):
        return type(leaf), str(leaf)
    return (type(leaf), repr(leaf)) if type(leaf) in _CONSTANTS else None


def _depends_on_data(value: Any) -> bool:
    parts = [part for part in pytree.tree_leaves(value) if isinstance(part, (Tensor, *_SYMBOLIC))]
    return any(free_unbacked_symbols(part) for part in parts)


def _is_among(value: Any, values: Iterable[Any]) -> bool:
    return any(value is other for other in values)


def _moved(stack: dict[str, tuple[str, str]], path: str, moved: str) -> dict[str, tuple[str, str]]:
    """The modules around a node, those from ``path`` on as they lie below ``moved``."""

    def move(name: str) -> str:
        return moved + name[len(path) :] if name == path or name.startswith(f"{path}.") else name

    return type(stack)((move(key), (move(inner), kind)) for key, (inner, kind) in stack.items())
