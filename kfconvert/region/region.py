"""A module captured as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Aliases, arguments, communicates, draws, schema_of, written_arguments
from ..inputs import CacheKind, CallForm, TreeForm, taken_apart
from ..wrapped_tensors import Path
from .guard import Guard

# The name of an attribute of an object such as a configuration, or (class of a module, name of its attribute).
# "__dict__" represents all names.
Read = str | tuple[type, str]


# Properties of a region that are needed after its graph is released.
_READ_FROM_GRAPH = ("communicates", "counts_statistics", "has_effects", "is_random", "returns_inputs")


class CaptureError(RuntimeError):
    """Raised if a module cannot be captured. The message has the reason in one line.

    ``place``: location of the cause in its code, see ``graph.location``; None if unknown.
    """

    def __init__(self, message: str, place: str | None = None):
        super().__init__(message)
        self.place = place


@dataclass
class Region:
    """A module captured as one graph.

    ``graph`` has a placeholder for every parameter, buffer, constant and user input, calls ATen operators, and returns
    the flat values of ``outputs``. ``root`` has the subgraphs that it calls. ``slots`` maps a placeholder to the place
    of its tensor in the model: (module path, attribute name). ``inputs`` names the placeholders of user inputs in the
    order of ``call``'s leaves. ``example`` describes the traced keyword arguments (see ``inputs.described``), None if
    they cannot be described. ``reads`` has the attributes of modules and their objects that the trace read (see
    ``runtime.state.configuration``).
    """

    graph: fx.Graph
    root: nn.Module
    call: CallForm
    guard: Guard
    inputs: list[str]
    slots: dict[str, tuple[str, str]]
    constants: dict[str, Tensor]
    outputs: TreeForm
    example: Any = None
    reads: frozenset[Read] = frozenset()
    # Whether calls must have the strides of the example, because code reads those of its arguments or outputs.
    has_fixed_layouts: bool = False
    # The autograd treatment of a call, by the parameters and arguments that require a gradient (see GuardedForward).
    differentiable: dict[bytes, Any] = field(default_factory=dict)
    # The default device during the trace, if new tensors may be on it; else None.
    default_device: torch.device | None = None
    # The result of ``stored_region`` before its graph was released, see ``keep``; None if it cannot be stored.
    stored: bytes | None = None
    # The placeholders whose tensor is this rank's shard of a distributed parameter.
    shards: frozenset[str] = frozenset()
    # The device type and dtype of autocast, if it was on in the trace. The graph has its casts, and runs without it.
    autocast: tuple[str, torch.dtype] | None = None
    # The placeholders whose tensor is inside the tensor at their place in ``slots``, with the attributes that lead
    # there: shards, and the data and scales of quantized weights.
    inner: dict[str, Path] = field(default_factory=dict)
    # Further placeholders of weights in other dtypes. ``slots`` has the places of the weights.
    casted: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def has_caches(self) -> bool:
        """Whether the region takes or returns key-value caches, flattened to tensors."""
        return self.outputs.holds_caches or bool(self.call.form.caches)

    @property
    def takes_static_cache(self) -> bool:
        """Whether the region is a step of generation with a static cache."""
        return any(isinstance(kind, CacheKind) and kind.is_static for kind in self.call.form.caches.values())

    def flat_outputs(self, run: Callable[..., Any], leaves: list[Any]) -> tuple[list[Any], TreeForm]:
        """Calls ``run`` with the flat inputs ``leaves`` as keyword arguments, and flattens its results and the caches
        among the inputs. Raises UnknownCache."""
        keywords = self.call.keywords(leaves)
        return taken_apart(run(**keywords), self.call.passed((), keywords))

    def note_default_device(self, device: torch.device) -> None:
        """Stores the default ``device`` of new tensors. Call it before the graph is rewritten."""
        made = (node.kwargs.get("device") for node in self.graph.nodes)
        if any(isinstance(each, torch.device) and each.type == device.type for each in made):
            self.default_device = device

    @cached_property
    def returns_inputs(self) -> bool:
        """Whether an output of the graph is identical to one of its inputs or weights."""
        returned = self.graph.output_node().args[0]
        return any(isinstance(value, fx.Node) and value.op == "placeholder" for value in returned)

    @cached_property
    def communicates(self) -> bool:
        """Whether a call of the graph waits for other ranks."""
        return any(map(communicates, self.graph.nodes))

    @cached_property
    def is_random(self) -> bool:
        """Whether a call of the graph draws random numbers."""
        return any(draws(node) for node in self.graph.nodes if node.op == "call_function")

    @cached_property
    def counts_statistics(self) -> bool:
        """Whether a norm in the graph writes running statistics."""
        return any(map(_counts_statistics, self.graph.nodes))

    @cached_property
    def has_effects(self) -> bool:
        """Whether a call of the graph has side effects: writes to its inputs, or assertions on their values."""
        graphs = [module.graph for module in self.root.modules() if isinstance(module, fx.GraphModule)]
        return any(map(_acts, (self.graph, *graphs)))

    def forget_graph(self) -> None:
        """Forgets what was computed from the graph. Call it after the graph has changed."""
        for name in _READ_FROM_GRAPH:
            vars(self).pop(name, None)

    def release_graph(self) -> None:
        """Releases the graph after the last program is created. Its traced values refer to all weights, and its nodes
        to each other, so both would live until the next cyclic garbage collection."""
        for name in _READ_FROM_GRAPH:
            getattr(self, name)  # computed from the graph, and cached
        self.graph, self.root = fx.Graph(), nn.Module()

    def dynamic(self) -> list[str]:
        """Returns the free sizes as text, such as ``input_ids.shape[1]``."""
        firsts = (dimensions[0] for dimensions in self.guard.free.values())
        return [f"{self.inputs[index]}.shape[{dimension}]" for index, dimension in firsts]


def _counts_statistics(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = dict(zip(schema_of(node.target).names, arguments(node)))
    counted = given.get("training", given.get("use_input_stats", given.get("train")))
    return bool(counted) and given.get("running_mean") is not None


def _acts(graph: fx.Graph) -> bool:
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.aten._assert_tensor_metadata.default:
            continue
        written = written_arguments(node)
        if any(each.op == "placeholder" for value in written for each in aliases.members(value)):
            return True
        nothing = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns
        if not written and (nothing or node.is_impure(impure_random=False)):
            return True
    return False
