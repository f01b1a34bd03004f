"""Brings ATen graphs to a canonical form, so that each pattern needs one spelling."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import (
    Aliases,
    Number,
    Op,
    Var,
    aliased_arguments,
    arguments,
    aten,
    communicates,
    has_effect,
    is_weight,
    location,
    schema_of,
    spell_numbers,
    spell_sizes,
    storage_of,
    unify,
    written_arguments,
)
from ..region import CaptureError
from .activations import rewrite_spellings
from .causal_masks import spell_causal_masks
from .contiguous import drop_kept_contiguous, lies_in_output
from .filled_tensors import spell_filled_tensors
from .masks import drop_true_masks, drop_zero_masks
from .products import scale_queries, spell_products
from .query_scales import fold_query_scales
from .repeated_heads import share_heads
from .views import mark_views, views_to_reshapes


def canonicalise(graph: fx.Graph) -> None:
    """Canonicalizes ``graph`` in place.

    Raises:
        CaptureError: the graph writes to an argument, a parameter or a buffer of the model.
    """
    for rewrite in PASSES:
        rewrite(graph)
    graph.eliminate_dead_code(has_effect)
    graph.lint()


def drop_trace_checks(graph: fx.Graph) -> None:
    """Removes checks of tensor metadata, because the guard has checked dtype, device and layout of every input."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def one_cast(graph: fx.Graph) -> None:
    """Replaces ``x.type_as(y)`` and ``x.to(y)`` on one device with ``x.to(dtype)``, because the guard has checked y."""
    for node in graph.nodes:
        if node.target not in (aten.type_as.default, aten.to.device) or _is_forced_copy(node):
            continue
        before, after = node.args[0].meta["val"], node.meta["val"]
        if before.device == after.device:
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], after.dtype), {}


_FACTORIES = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def spell_factories(graph: fx.Graph) -> None:
    """Replaces ``x.new_zeros(size)`` with ``zeros(size, dtype, device)``, which does not depend on x."""
    for node in graph.nodes:
        if node.target in _FACTORIES:
            value = node.meta["val"]
            node.target, node.args = _FACTORIES[node.target], node.args[1:]
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def drop_identities(graph: fx.Graph) -> None:
    """Removes dropout in eval mode, full slices, and conversions to the dtype and device of the value."""
    for node in list(reversed(graph.nodes)):  # later slices first, to detect whether a slice is returned
        if node.target is aten.softmax.int and arguments(node)[2] is node.args[0].meta["val"].dtype:
            node.args, node.kwargs = arguments(node)[:2], {}
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_DROPOUTS = {
    getattr(aten, f"{name}{suffix}").default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
}


_CONVERSIONS = (aten.to.device, aten.to.dtype, aten.to.dtype_layout)


def _is_identity(node: fx.Node) -> bool:
    if node.target in _DROPOUTS:
        return not node.args[2]
    if node.target is aten.detach_.default:  # torch.tensor detaches its result
        made = node.args[0]
        while made.target in _CONVERSIONS:
            made = made.args[0]
        return made.target is aten.lift_fresh_copy.default
    if node.target is aten.slice.Tensor:
        # A returned slice is a separate tensor. The caller may change its shape in place without changing the sliced
        # tensor.
        if any(user.op == "output" for user in node.users):
            return False
        _, _, start, end, step = arguments(node)
        return start in (0, None) and end == 2**63 - 1 and step == 1
    if node.target in (aten.to.dtype_layout, aten.to.dtype):
        before, after = node.args[0].meta["val"], node.meta["val"]
        return not _is_forced_copy(node) and before.dtype is after.dtype and before.device == after.device
    return False


def _is_forced_copy(conversion: fx.Node) -> bool:
    kwargs: dict[str, Any] = conversion.kwargs
    return kwargs.get("copy", False) or kwargs.get("memory_format") is not None or len(conversion.args) > 3


def make_functional(graph: fx.Graph) -> None:
    """Replaces ``relu_(x)`` with ``relu(x)`` if no other view of x sees the write, and no output depends on x's layout.

    Raises:
        CaptureError: the write reaches an argument, a parameter or a buffer.
    """
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        written = written_arguments(node)
        if not written:
            continue
        for target in written:
            if any(member.op == "placeholder" for member in aliases.members(target)):
                reason = f"{node.target} writes in place to an argument, parameter or buffer of the model"
                raise CaptureError(reason, location(node))
        functional, value = _functional_form(node)
        if functional is None or not _is_private(node, written, aliases, order):
            continue
        target = node.args[0]
        # A later view or output of a result with other strides would share other memory.
        keeps_strides = str(value.stride()) == str(node.meta["val"].stride())
        if not keeps_strides and (lies_in_output(node) or _is_written_later(node, aliases, order)):
            continue
        node.target = functional
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)
        if target.target is aten.empty_like.default and len(target.users) == 1:
            # As in the inverse of a permutation. A stored graph returns no uninitialized memory.
            target.target = aten.zeros_like.default


def _functional_form(node: fx.Node) -> tuple[torch._ops.OpOverload, Tensor] | tuple[None, None]:
    """Returns the operator that computes the written value of ``node``, and the value; (None, None) without one."""
    packet, overload = node.target._schema.name.removeprefix("aten::"), node.target._overloadname
    found = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
    if not packet.endswith("_") or found is None:
        return None, None
    takes, wanted = ([(a.name, str(a.type)) for a in target._schema.arguments] for target in (found, node.target))
    if takes != wanted:  # for example pow_, which has the overload with another base
        return None, None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    value = found(*args, **kwargs)
    # In-place comparisons keep the dtype of their target; others return booleans.
    is_alike = isinstance(value, Tensor) and value.dtype == node.meta["val"].dtype
    return (found, value) if is_alike else (None, None)


def _is_written_later(node: fx.Node, aliases: Aliases, order: dict[fx.Node, int]) -> bool:
    """Whether a write after ``node`` reaches the memory that it writes to."""
    return any(
        order[user] > order[node] and member in written_arguments(user)
        for member in aliases.members(node)
        for user in member.users
    )


def _is_private(node: fx.Node, written: list[fx.Node], aliases: Aliases, order: dict[fx.Node, int]) -> bool:
    """Whether the write is visible only through the written value and the result of this call."""
    if written != [node.args[0]]:
        return False
    names = schema_of(node.target).names[1:]
    others = [each for each, name in zip(node.args[1:], names) if isinstance(each, fx.Node) and name != "index"]
    dtype = node.meta["val"].dtype
    if any(isinstance(v := o.meta.get("val"), Tensor) and v.dtype not in (dtype, torch.bool) for o in others):
        return False  # the functional form would promote to another dtype
    target = node.args[0]
    for member in aliases.members(target):
        if member is target or order[member] >= order[node] or _is_of_same_call(member, target):
            continue
        if any(order[user] > order[node] for user in member.users):
            return False
    return True


def _is_of_same_call(member: fx.Node, item: fx.Node) -> bool:
    """Whether ``member`` is the call that returns ``item`` among other tensors in separate memory, or one of these."""
    call = item.args[0] if item.target is operator.getitem else None
    if not isinstance(call, fx.Node) or getattr(call.target, "namespace", None) != "aten" or aliased_arguments(call):
        return False  # results of other operators may share memory that those of their fake kernels do not
    if member is call:
        return all(user.target is operator.getitem for user in call.users)
    if member.target is not operator.getitem or member.args[0] is not call or member.args[1] == item.args[1]:
        return False
    return storage_of(member) not in (None, storage_of(item))


def drop_copies_of_collectives(graph: fx.Graph) -> None:
    """Removes copies of results of collectives. A collective that writes to its argument is traced as one with a new
    tensor, and a copy to the argument, which is not needed if nothing else reads the tensor."""
    for node in list(graph.nodes):
        if node.target is not aten.copy.default:
            continue
        target, made = node.args[:2]
        if not (isinstance(made, fx.Node) and communicates(made) and list(made.users) == [node]):
            continue
        kinds = [(value.shape, value.dtype, value.stride()) for value in (target.meta["val"], made.meta["val"])]
        if kinds[0] == kinds[1]:
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def addmm_to_linear(graph: fx.Graph) -> None:
    """Replaces ``reshape(addmm(b, reshape(x, [-1, K]), W), [..., N])``, as in GPT-2, with ``linear(x, W.t(), b)``."""
    flat = Op(aten.reshape.default, Var("x"), Var("flat"), name="flattened")
    product = Op(aten.addmm.default, Var("bias"), flat, Var("weight"), name="product")
    tree = Op(aten.reshape.default, product, Var("shape"))
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        for found in unify(tree, node):
            if aliases.reads_written(found):
                continue
            x, weight, bias = (found.captures[name] for name in ("x", "weight", "bias"))
            before, after = x.meta["val"], node.meta["val"]
            if not (is_weight(weight) and is_weight(bias) and len(found.captures["product"].users) == 1):
                continue
            if not _keeps_rows(before, after):
                continue
            # The reshape may also split the rows of x, for example into heads.
            if bias.meta["val"].dim() != 1 or not _same_sizes(before.shape[-1:], weight.meta["val"].shape[:1]):
                continue
            with graph.inserting_before(node):
                transposed = graph.call_function(aten.t.default, (weight,))
                linear = graph.call_function(aten.linear.default, (x, transposed, bias))
            transposed.meta = {"val": weight.meta["val"].t()}
            linear.meta = {**found.captures["product"].meta, "val": after}
            node.replace_all_uses_with(linear)
            break


def scaled_mm_to_linear(graph: fx.Graph) -> None:
    """Replaces ``reshape(mm(reshape(x, [-1, K]), W.t().to(dtype)) * s, [..., N])``, as torchao computes layers with
    int8 weights W, with ``linear(x, W.to(dtype)) * s``."""
    flat = Op(aten.reshape.default, Var("x"), Var("flat"))
    cast = Op(aten.to.dtype, Op(aten.t.default, Var("weight")), Var("dtype"))
    product = Op(aten.mm.default, flat, cast, name="product")
    tree = Op(aten.reshape.default, Op(aten.mul.Tensor, product, Var("scale"), name="scaled"), Var("shape"))
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        for found in unify(tree, node):
            x, weight, scale, scaled, multiplied = (
                found.captures[name] for name in ("x", "weight", "scale", "scaled", "product")
            )
            before, after = x.meta["val"], node.meta["val"]
            users = [*scaled.users, *multiplied.users]
            if not is_weight(weight) or aliases.reads_written(found) or users != [node, scaled]:
                continue
            # A scale of one dimension keeps its meaning for more dimensions of x.
            if not _keeps_rows(before, after) or scale.meta["val"].dim() != 1:
                continue
            sizes = [value.meta["val"].shape for value in (multiplied, scaled, weight)]
            if not _same_sizes(*sizes[:2]) or not _same_sizes(before.shape[-1:], sizes[2][1:]):
                continue
            with graph.inserting_before(node):
                wide = graph.call_function(aten.to.dtype, (weight, found.captures["dtype"]))
                linear = graph.call_function(aten.linear.default, (x, wide))
                result = graph.call_function(aten.mul.Tensor, (linear, scale))
            wide.meta = {"val": weight.meta["val"].to(found.captures["dtype"])}
            linear.meta = {**multiplied.meta, "val": after}
            result.meta = {**scaled.meta, "val": after}
            node.replace_all_uses_with(result)
            break


def _keeps_rows(before: Tensor, after: Tensor) -> bool:
    """Whether all sizes but the last one are equal."""
    return before.dim() == after.dim() and _same_sizes(before.shape[:-1], after.shape[:-1])


def _same_sizes(left: torch.Size, right: torch.Size) -> bool:
    return str(tuple(left)) == str(tuple(right))


def spell_activations(graph: fx.Graph) -> None:
    """Replaces activations in elementary operations with one call, and the hardtanh form of relu6 with relu6."""
    for node in list(graph.nodes):
        for found in unify(Op(aten.hardtanh.default, Var("x"), Number(0), Number(6)), node):
            node.target, node.args = aten.relu6.default, (found.captures["x"],)
    rewrite_spellings(graph)


PASSES: tuple[Callable[[fx.Graph], None], ...] = (
    mark_views,
    drop_trace_checks,
    spell_sizes,
    drop_kept_contiguous,
    one_cast,
    spell_factories,
    drop_identities,
    spell_filled_tensors,
    make_functional,
    drop_copies_of_collectives,
    views_to_reshapes,
    addmm_to_linear,
    scaled_mm_to_linear,
    spell_numbers,
    spell_products,
    scale_queries,
    drop_true_masks,
    spell_causal_masks,
    share_heads,
    drop_zero_masks,
    fold_query_scales,
    spell_activations,
)
