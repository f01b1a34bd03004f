"""A module captured as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import Aliases, arguments, communicates, draws, written_arguments
from ..inputs import CallForm, TreeForm, is_static_kind, taken_apart
from .guard import Guard

# The name of an attribute of an object such as a configuration, or (class of a module, name of its attribute).
# "__dict__" stands for all names.
Read = str | tuple[type, str]


# Properties of a region that are wanted after its graph is gone.
_READ_FROM_GRAPH = (
    "communicates",
    "counts_statistics",
    "has_effects",
    "is_random",
    "returns_inputs",
    "unread",
)


class CaptureError(RuntimeError):
    """The module cannot be captured; the message says why in one line.

    ``place``: where in its code the cause is, as of ``graph.location``; None where that is not known.
    """

    def __init__(self, message: str, place: str | None = None):
        super().__init__(message)
        self.place = place


@dataclass
class Region:
    """A module captured as one graph.

    ``graph`` has a placeholder for every parameter, buffer, constant and user input, calls ATen operators, and
    returns the flat values of ``outputs``; ``root`` holds the subgraphs that it calls. ``slots`` tells where the tensor
    of a placeholder lives in the model: (module path, attribute name). ``inputs`` names the placeholders of the user
    inputs in the order of ``call``'s leaves. ``example`` describes the keyword arguments that it was traced with (see
    ``inputs.described``), None where that cannot be; ``reads`` has what it read of modules and of the objects
    that they hold (see ``runtime.state.configuration``).
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
    # What the code behind it asks of tensors, see ``tensor_facts``.
    asked: frozenset[str] = frozenset()
    # Whether its outputs go to code that reads how they lie in memory.
    is_read_by_layout: bool = False
    # What autograd does with a call, by which parameters and arguments want a gradient (see GuardedForward).
    differentiable: dict[bytes, Any] = field(default_factory=dict)
    # That at the time of the trace, if new tensors may lie there because it was the default; else None.
    default_device: torch.device | None = None
    # What ``stored_region`` has told of it before its graph was released, see ``keep``; None where it cannot be stored.
    stored: bytes | None = None
    # The placeholders whose tensor is the shard of a distributed parameter that this rank holds.
    shards: frozenset[str] = frozenset()
    # The placeholders that get another gradient from the graph than from the module, see ``capture.lost_gradients``.
    lost_gradients: frozenset[str] = frozenset()

    @property
    def has_caches(self) -> bool:
        """Whether it takes or returns key-value caches, each as its tensors."""
        return self.outputs.holds_caches or bool(self.call.form.caches)

    @property
    def takes_static_cache(self) -> bool:
        """Whether it is a step of generation on a static cache."""
        return any(map(is_static_kind, self.call.form.caches.values()))

    def flat_outputs(self, run: Callable[..., Any], leaves: list[Any]) -> tuple[list[Any], TreeForm]:
        """What ``run`` returns for the flat inputs ``leaves``, given as keyword arguments, and makes of the caches
        among these. Raises UnknownCache."""
        keywords = self.call.keywords(leaves)
        return taken_apart(run(**keywords), self.call.passed((), keywords))

    def note_default_device(self, device: torch.device) -> None:
        """To be called before the graph is rewritten: ``device`` is that of new tensors for which none is named."""
        made = (node.kwargs.get("device") for node in self.graph.nodes)
        if any(isinstance(each, torch.device) and each.type == device.type for each in made):
            self.default_device = device

    @cached_property
    def returns_inputs(self) -> bool:
        """Whether an output of the graph is one of its inputs, or a weight, itself."""
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
        """Whether a norm in the graph writes running statistics of what it is given."""
        return any(map(_counts_statistics, self.graph.nodes))

    @cached_property
    def has_effects(self) -> bool:
        """Whether a call of the graph does something besides what it returns: writes to its inputs, or asserts what
        depends on their values."""
        graphs = [module.graph for module in self.root.modules() if isinstance(module, fx.GraphModule)]
        return any(map(_acts, (self.graph, *graphs)))

    @cached_property
    def unread(self) -> frozenset[tuple[str, str]]:
        """Those of ``slots`` that the graph does not compute with."""
        return frozenset(
            self.slots[node.name] for node in self.graph.nodes if node.name in self.slots and not node.users
        )

    def release_graph(self) -> None:
        """Forget the graph, once no program is made of it any more: its traced values refer to all weights, and its
        nodes to each other, so that both would live until Python's cyclic collector comes by."""
        for name in _READ_FROM_GRAPH:
            getattr(self, name)  # it is read from the graph, and kept
        self.graph, self.root = fx.Graph(), nn.Module()

    def dynamic(self) -> list[str]:
        """The free sizes in words, such as ``input_ids.shape[1]``."""
        firsts = (dimensions[0] for dimensions in self.guard.free.values())
        return [f"{self.inputs[index]}.shape[{dimension}]" for index, dimension in firsts]


def _counts_statistics(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    named = arguments(node)
    given = dict(zip((argument.name for argument in node.target._schema.arguments), named))
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
