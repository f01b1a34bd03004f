"""Inputs of one site of each kind, recorded in a run of the region's graph, and the original's results for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from ..accuracy import in_float64
from ..graph import lower
from ..matching import Site
from ..modules import CHANNELS_LAST
from ..process import without_cudnn_attention
from ..region import LiveTensors, Region
from ..torch_state import without_autocast


@dataclass(frozen=True)
class Sample:
    """Real inputs of one site, and the original subgraph for them."""

    site: Site
    inputs: tuple[Tensor, ...]
    subgraph: Callable[..., Any]
    exact_subgraph: Callable[..., Any]
    arguments: tuple[Any, ...]  # tensors, and sizes as integers
    # The strides of the inputs in a program with channels-last images.
    strides: tuple[tuple[int, ...], ...]
    # A description of the kind of site that is equal in all processes: everything that affects times, except for the
    # environment.
    description: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation: of the first floating-point input, or of the result for integers."""
        results = [node.meta["val"] for node in self.site.replacement.outputs]
        return next(x.dtype for x in (*self.inputs, *results) if x.is_floating_point())

    @property
    def is_remembered(self) -> bool:
        """Whether its timings are valid for other processes as well."""
        module: Any = self.site.replacement.module
        return module.is_remembered

    @property
    def has_layouts(self) -> bool:
        """Whether the memory format of images matters to it."""
        return has_layout(self.site) or any(x.stride() != strides for x, strides in zip(self.inputs, self.strides))

    def laid_out(self, channels_last: bool) -> tuple[Tensor, ...]:
        """Returns the inputs, with images in the memory format of a program with that layout."""
        return tuple(map(_with_strides, self.inputs, self.strides)) if channels_last else self.inputs

    def original(self) -> Any:
        return self.subgraph(*self.arguments)

    def exact(self) -> Any:
        """Returns the result of the original subgraph in float64: the model's casts become casts to float64."""
        return self.exact_subgraph(*map(_in_float64, self.arguments))

    def exact_of_neighbours(self) -> Any:
        """Like :meth:`exact`, for inputs that differ from these by their rounding error."""
        return self.exact_subgraph(*map(_neighbour, self.arguments))


class _Layouts(fx.Interpreter):
    """Runs a region's graph with channels-last images, and records the strides of the inputs of each site."""

    def __init__(self, region: Region, sites: list[Site]):
        super().__init__(region.root, graph=region.graph)
        self._strides: dict[fx.Node, tuple[int, ...]] = {}
        self._read = {node for site in sites for node in site.replacement.inputs}
        self._images = {node for site in sites if has_layout(site) for node in site.replacement.outputs}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node in self._images and result.dim() in CHANNELS_LAST:
            result = result.contiguous(memory_format=CHANNELS_LAST[result.dim()])
        if node in self._read:
            self._strides[node] = result.stride()
        return result

    def of(self, site: Site) -> tuple[tuple[int, ...], ...]:
        return tuple(self._strides[node] for node in site.replacement.inputs)


class _Recorder(fx.Interpreter):
    """Runs a region's graph and records the inputs of one site of each kind."""

    def __init__(self, region: Region, sites: list[Site], layouts: _Layouts | None):
        super().__init__(region.root, graph=region.graph)
        self.layouts = layouts
        self.kinds: dict[int, Any] = {}
        self.samples: dict[Any, Sample] = {}
        # A value is kept from its computation until the last site that reads it is recorded.
        self._held: dict[fx.Node, Any] = {}
        self._readers: Counter[fx.Node] = Counter()
        self._sites_at: dict[fx.Node, list[tuple[Site, list[fx.Node]]]] = {}
        order = {node: index for index, node in enumerate(region.graph.nodes)}
        for site in sites:
            outer = _outer_values(site)
            self._readers.update(outer)
            self._sites_at.setdefault(max(outer, key=order.__getitem__), []).append((site, outer))

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node in self._readers:
            self._held[node] = result
        for site, outer in self._sites_at.get(node, ()):
            self._record(site, outer)
            self._readers.subtract(outer)
            for value in outer:
                if not self._readers[value]:
                    self._held.pop(value, None)
        return result

    def _record(self, site: Site, outer: list[fx.Node]) -> None:
        inputs = tuple(self._held[node] for node in site.replacement.inputs)
        layouts = tuple((tuple(x.shape), x.stride(), x.dtype) for x in inputs)
        strides = tuple(x.stride() for x in inputs) if self.layouts is None else self.layouts.of(site)
        tensors = tuple(name for _, name, _ in site.replacement.bindings)
        kind = (site.match.pattern.name, site.kind, tensors, len(site.replacement.outputs), layouts, strides)
        self.kinds[id(site)] = kind
        if kind in self.samples:
            return
        arguments = tuple(self._held[node] for node in outer)
        subgraph, exact = _subgraph(site, outer), _subgraph(site, outer, _in_float64)
        description = _described(site, outer, arguments)
        self.samples[kind] = Sample(site, inputs, subgraph, exact, arguments, strides, description)


@without_cudnn_attention()
def sample_inputs(
    region: Region, sites: list[Site], live: LiveTensors, leaves: list[Any]
) -> tuple[dict[int, Any], dict[Any, Sample]]:
    """Returns the kind of each site, by its id, and a sample of each kind."""
    layouts = _Layouts(region, sites) if any(map(has_layout, sites)) else None
    recorder = _Recorder(region, sites, layouts)
    with torch.no_grad(), without_autocast():
        if layouts is not None:
            try:
                layouts.run(*live.arguments(leaves))
            except RuntimeError:  # an operator accepts contiguous images only, so no program has others
                recorder.layouts = None
        recorder.run(*live.arguments(leaves))
    return recorder.kinds, recorder.samples


def has_layout(site: Site) -> bool:
    """Whether its module receives and returns images in a memory format that a program chooses."""
    return hasattr(site.replacement.module, "channels_last")


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def _covered(site: Site) -> list[fx.Node]:
    return sorted(set(site.match.nodes))  # siblings may share a call


def _outer_values(site: Site) -> list[fx.Node]:
    """Returns the values that the matched calls read: inputs and weights."""
    covered = _covered(site)
    return list(dict.fromkeys(value for node in covered for value in node.all_input_nodes if value not in covered))


def _described(site: Site, outer: list[fx.Node], arguments: tuple[Any, ...]) -> str:
    """Describes the fused module, the values that the matched calls read, and these calls."""
    covered = _covered(site)
    names = {node: f"%{index}" for index, node in enumerate((*outer, *covered))}
    values = [f"{names[node]}: {_layout_text(value)}" for node, value in zip(outer, arguments)]
    calls = [
        f"{names[node]} = {getattr(node.target, '__name__', node.target)}"
        f"{map_arg((node.args, node.kwargs), names.__getitem__)}"
        for node in covered
    ]
    replacement = site.replacement
    used = [names[node] for node in (*replacement.inputs, *replacement.outputs)]
    tensors = [name for _, name, _ in replacement.bindings]
    module = " ".join(site.kind.split())
    return f"{site.match.pattern.name}: {module} of {tensors} from and to {used}; {'; '.join(values + calls)}"


def _layout_text(value: Any) -> str:
    """Describes a tensor by dtype, shape and strides, and any other value by its text."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} by {list(value.stride())}"


def _in_float64(value: Any) -> Any:
    """Converts a floating-point tensor, or a floating-point dtype argument, to float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return in_float64(value)


def _neighbour(value: Any) -> Any:
    """Returns a float64 tensor, each element times a random factor within half a rounding unit of its dtype."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return _in_float64(value)
    generator = torch.Generator(value.device).manual_seed(0)
    shifts = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) - 0.5
    return value.double() * (1 + torch.finfo(value.dtype).eps * shifts)


def _subgraph(site: Site, outer: list[fx.Node], change: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Returns the matched calls as a function of ``outer``, the values they read; ``change`` maps their constants."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"value_{index}") for index, node in enumerate(outer)}
    for node in _covered(site):
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        if change is not None:
            copied.args, copied.kwargs = map_aggregate(copied.args, change), map_aggregate(copied.kwargs, change)
    graph.output(tuple(copies[node] for node in site.replacement.outputs))
    lower(graph)
    return fx.GraphModule(torch.nn.Module(), graph).forward
