"""New tensors that copies to their slices fill, as the keys and queries of DeepSeek: they are concatenations."""

from __future__ import annotations

from torch import Tensor, fx

from ..graph import Aliases, arguments, aten

_NEW = (aten.new_empty.default, aten.empty_like.default, aten.empty.memory_format)


def spell_filled_tensors(graph: fx.Graph) -> None:
    """Replaces an uninitialized tensor with the ``cat`` of the values that are copied to all of its slices."""
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target not in _NEW:
            continue
        slices = [user for user in node.users if user.target is aten.slice.Tensor]
        copies = [user for each in slices for user in each.users]
        readers = [user for user in node.users if user not in slices]
        if len(copies) < 2 or not _fill(node, slices, copies):
            continue
        last = max(copies, key=order.__getitem__)
        sources = [copy.args[1] for copy in copies]
        if any(order[reader] < order[last] for reader in readers) or any(map(aliases.is_written, sources)):
            continue
        pairs = sorted(zip(slices, sources), key=lambda pair: arguments(pair[0])[2] or 0)
        with graph.inserting_before(last):
            filled = graph.call_function(aten.cat.default, ([source for _, source in pairs], arguments(slices[0])[1]))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled, readers.__contains__)
        for erased in (*copies, *slices, node):
            graph.erase_node(erased)


def _fill(node: fx.Node, slices: list[fx.Node], copies: list[fx.Node]) -> bool:
    """Whether each of ``slices`` of the contiguous new tensor has one copy, and these fill it."""
    new = node.meta["val"]
    if not new.is_contiguous() or len({arguments(each)[1] for each in slices}) > 1:
        return False
    for each in slices:
        (copy,) = each.users if len(each.users) == 1 else (None,)
        source = None if copy is None or copy.target is not aten.copy_.default else copy.args[1]
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, Tensor) or copy.users or copy.args[0] is not each or source is each:
            return False
        target = each.meta["val"]
        if (value.dtype, value.device, str(value.shape)) != (target.dtype, target.device, str(target.shape)):
            return False
    size = new.shape[arguments(slices[0])[1]]
    bounds = sorted(tuple(_bounds(each, size)) for each in slices) if isinstance(size, int) else []
    starts, ends = [start for start, _ in bounds], [end for _, end in bounds]
    return bool(bounds) and [0, *ends] == [*starts, size]


def _bounds(part: fx.Node, size: int) -> tuple[int, int]:
    """Returns start and end of a slice, or numbers that fit no other slice."""
    _, _, start, end, step = arguments(part)
    start, end = 0 if start is None else start, size if end is None else end
    is_plain = step == 1 and isinstance(start, int) and isinstance(end, int) and start >= 0 and end >= 0
    return (start, min(end, size)) if is_plain else (-1, -1)
