"""Gradients through a fused program: run it, and recompute the original if backward is called.

Many users call models in eval mode without ``torch.no_grad()`` and never call backward; they get the fused speed. A
backward pass computes the gradients of the original forward, at the price of one more forward (as with activation
checkpointing, Chen et al., arXiv:1604.06174).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..state.derived import memory_of


def needs_gradient(parameters: list[Tensor], leaves: list[Any]) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    return any(p.requires_grad for p in parameters) or any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
    )


def is_connected(outputs: list[Any]) -> bool:
    """Whether autograd's graph computes one of ``outputs`` from another. The gradient of the source then includes a
    share through the other output, which separate outputs of one autograd function do not have."""
    ends = {output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None}
    return any(node in ends for node in autograd_nodes(node for end in ends for node, _ in end.next_functions))


def has_reentrant_checkpoint(outputs: list[Any]) -> bool:
    """Whether ``outputs`` depend on a checkpoint with ``use_reentrant=True``, which calls ``backward`` itself and
    rejects ``torch.autograd.grad``."""
    nodes = autograd_nodes(output.grad_fn for output in outputs if isinstance(output, Tensor))
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def autograd_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Each of the ``nodes`` of autograd's graph, of which some may be None, and all nodes that they lead to, once."""
    seen: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [before for before, _ in node.next_functions]


def run_recorded(
    fused: Callable[[list[Any]], tuple[Any, ...]],
    original: Callable[[list[Any]], Any],
    parameters: list[Tensor],
    leaves: list[Any],
    differentiable: tuple[bool, ...],
    held: list[Tensor],
) -> tuple[Any, ...]:
    """The flat outputs of ``fused(leaves)``, with the gradients of ``original(leaves)`` for those ``differentiable``.

    Gradients reach the ``parameters`` and leaves that require them. An in-place change of one of them between forward
    and backward is an error, as usual in autograd. ``held`` are the tensors of the model that ``fused`` reads: a view
    of one of them is returned directly.
    """
    # Each parameter once: autograd would add the one gradient of a tied weight for each time that the weight is passed.
    wanted = list(dict.fromkeys(p for p in parameters if p.requires_grad))
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = (*wanted, *(leaves[i] for i in indices))
    return _Recomputed.apply(fused, original, leaves, differentiable, held, indices, len(wanted), *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fused, original, leaves, differentiable, held, indices, count, *tensors):
        ctx.original, ctx.indices, ctx.count = original, indices, count
        ctx.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.save_for_backward(*tensors)
        outputs = _without_bases(fused(leaves), (*tensors, *held))
        # An unused output has no gradient, and its inputs must not receive a gradient of zeros either.
        ctx.set_materialize_grads(False)
        without = (o for o, wanted in zip(outputs, differentiable) if isinstance(o, Tensor) and not wanted)
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        again = torch.is_grad_enabled()  # for second derivatives (create_graph=True)
        with torch.inference_mode(False), torch.set_grad_enabled(again):  # otherwise autograd records nothing
            return _Recomputed._gradients(ctx, again, gradients)

    @staticmethod
    def _gradients(ctx, again, gradients):
        saved = ctx.saved_tensors
        parameters, inputs = saved[: ctx.count], saved[ctx.count :]
        leaves = list(ctx.constants)
        barrier = _Barrier()
        for place, tensor in zip(ctx.indices, inputs):
            if again and tensor.requires_grad:
                leaves[place] = _Alias.apply(tensor, barrier)
            else:
                leaves[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        with torch.enable_grad():
            outputs = pytree.tree_leaves(ctx.original(leaves))
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        wanted = [*parameters, *(leaves[place] for place in ctx.indices)]
        sources = [tensor for tensor in wanted if tensor.requires_grad]
        if not sources:  # all were frozen meanwhile
            return (None,) * (7 + len(wanted))
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], sources, [g for _, g in pairs], allow_unused=True, create_graph=again
            )
        )
        barrier.closed = False
        return (None,) * 7 + tuple(next(found) if tensor.requires_grad else None for tensor in wanted)


def _without_bases(outputs: tuple[Any, ...], known: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """``outputs`` with each view replaced by a separate tensor over the same memory, so that callers may write into it:
    autograd forbids writes to views that were created here. A view stays if another output or a ``known`` tensor shares
    its memory, because a write must then change the version of that tensor."""
    memory = Counter(memory_of(value) for value in (*outputs, *known) if isinstance(value, Tensor))
    return tuple(
        _own(value) if isinstance(value, Tensor) and value._is_view() and memory[memory_of(value)] == 1 else value
        for value in outputs
    )


def _own(view: Tensor) -> Tensor:
    """A tensor over the memory of ``view``; conjugate and negative views are copied."""
    if view.is_conj() or view.is_neg():
        return view.resolve_conj().resolve_neg()
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


@dataclass
class _Barrier:
    closed: bool = True


class _Alias(torch.autograd.Function):
    """An input as a separate tensor, so that an input that is passed twice gets a gradient for each position.

    While the barrier is closed, gradients stop here: an input may depend on another input or on a parameter, and the
    outer autograd graph adds that share. Once the barrier is open, second derivatives pass.
    """

    @staticmethod
    def forward(ctx, tensor, barrier):
        ctx.barrier = barrier
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return None if ctx.barrier.closed else gradient, None
