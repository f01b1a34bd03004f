"""New tensors that copies to their slices fill, as the keys and queries of DeepSeek: they are concatenations."""

from __future__ import annotations

from torch import fx

from ..graph import Aliases, arguments, aten

_NEW = (aten.new_empty.default, aten.empty_like.default, aten.empty.memory_format)


def spell_filled_tensors(graph: fx.Graph) -> None:
    """Replaces an uninitialized tensor with the ``cat`` of the values that are copied to all of its slices."""
    for node in list(graph.nodes):
        if node.target not in _NEW:
            continue
        copies = {each: copy for each in node.users if (copy := _copy_to(each)) is not None}
        if len(copies) < 2 or not _fill(node, list(copies)):
            continue
        # A source may be the cat of another such tensor, so the analysis is that of the graph as it is now.
        order, aliases = {each: index for index, each in enumerate(graph.nodes)}, Aliases(graph)
        readers = [user for user in node.users if user not in copies]
        last = max(copies.values(), key=order.__getitem__)
        sources: list[fx.Node] = [copy.args[1] for copy in copies.values()]  # type: ignore[misc]  # see _copy_to
        if any(order[reader] < order[last] for reader in readers) or any(map(aliases.is_written, sources)):
            continue
        parts = sorted(copies, key=lambda part: arguments(part)[2] or 0)
        with graph.inserting_before(last):
            values = [copies[part].args[1] for part in parts]
            filled = graph.call_function(aten.cat.default, (values, arguments(parts[0])[1]))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled, readers.__contains__)
        for erased in (*copies.values(), *copies, node):
            graph.erase_node(erased)


def _copy_to(part: fx.Node) -> fx.Node | None:
    """Returns the only user of the slice ``part``, if it copies a tensor of the same kind to it, else None."""
    if part.target is not aten.slice.Tensor or len(part.users) != 1:
        return None
    (copy,) = part.users
    if copy.target is not aten.copy_.default or copy.users or copy.args[0] is not part:
        return None
    value, target = copy.args[1].meta["val"], part.meta["val"]
    kinds = [(each.dtype, each.device, str(each.shape)) for each in (value, target)]
    return copy if kinds[0] == kinds[1] else None


def _fill(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether these slices of the new tensor, along one dimension, make the whole, and it is contiguous."""
    new, dimension = node.meta["val"], arguments(parts[0])[1]
    size = new.shape[dimension]
    if not new.is_contiguous() or not isinstance(size, int) or any(arguments(each)[1] != dimension for each in parts):
        return False
    bounds = sorted(_bounds(each, size) for each in parts)
    return [0, *(end for _, end in bounds)] == [*(start for start, _ in bounds), size]


def _bounds(part: fx.Node, size: int) -> tuple[int, int]:
    """Returns start and end of a slice, or numbers that fit no other slice."""
    _, _, start, end, step = arguments(part)
    start, end = 0 if start is None else start, size if end is None else end
    is_plain = step == 1 and isinstance(start, int) and isinstance(end, int) and start >= 0 and end >= 0
    return (start, min(end, size)) if is_plain else (-1, -1)
