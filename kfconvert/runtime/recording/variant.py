"""One way of a model to be called, with the program for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from ...region import Region
from ..state.active_modes import default_device
from ..state.tensor_facts import are_decided, facts
from .cuda_graphs import Ahead, CudaGraphs
from .program import Program, lies_as


@dataclass
class Variant:
    """One captured call form of the model and the program that serves it."""

    region: Region
    program: Program
    # The memory format of each image among the flat inputs of the example; empty if none was channels-last. If one was,
    # images in another memory format give results in another memory format.
    memory_formats: tuple[bool | str, ...] = ()
    # Where and how those flat inputs lie that have to lie as in the example, see ``Program.strides``.
    strides: list[Any] = field(default_factory=list)
    # The answers to what its code asks of tensors, for the example's tensors and the weights.
    facts: list[Any] = field(default_factory=list)
    # Whether calls of this form run the program. Where nothing is fused in it, and no recording makes it faster, they
    # run the original forward.
    serves: bool = True

    def facts_of(self, leaves: list[Any]) -> list[Any]:
        """The answers that the code behind the program would get to what it asks of tensors. Raises UnfitTensors where
        a tensor was removed."""
        asked = self.region.asked
        return facts(asked, (*leaves, *self.program.tensors())) if are_decided(asked) else []

    def refusal(self, leaves: list[Any] | None) -> str | None:
        if leaves is None:
            return "other arguments"
        refusal = self.region.guard.refusal(leaves)
        if refusal is None and self.region.default_device not in (None, default_device()):
            return f"the default device is {default_device()}; at conversion it was {self.region.default_device}"
        if refusal is None and self.memory_formats and self.program.memory_formats(leaves) != self.memory_formats:
            return "the memory format of an image differs from the example's, which was channels-last"
        if refusal is None and self.strides and not lies_as(leaves, self.strides):
            return "argument strides differ from the example's, and the model's code depends on strides"
        if refusal is None and self.region.asked and self.facts_of(leaves) != self.facts:
            return f"the model's code reads {', '.join(sorted(self.region.asked))} of its inputs; the example's differ"
        return refusal

    @property
    def is_recorded(self) -> bool:
        """Whether CUDA graphs may be recorded of it. A cache that it takes has another length in each call, but for one
        that is empty yet; a recording runs the program more than once, in which other ranks, that may record at other
        times, would have to take part.
        """
        return not (self.region.call.takes_filled_cache or self.region.communicates)

    @property
    def is_replayable(self) -> bool:
        """Whether its calls, or the steps of ``generate`` made by it, may be replayed from CUDA graphs."""
        return self.is_recorded or self.region.takes_static_cache

    def traced(self, leaves: list[Any]) -> Any:
        """The outputs of a region without caches, from fused modules on live tensors, for torch.export to trace."""
        return pytree.tree_unflatten(self.program.traced(leaves), self.region.outputs.spec)

    def run(self, leaves: list[Any], passed: Sequence[Any] = ()) -> Any:
        """The outputs. The ``passed`` caches, whose tensors are among ``leaves``, are written to."""
        return self.region.outputs.put_together(self.program.run(leaves), passed)

    def flat(self, leaves: list[Any], graphs: CudaGraphs, is_part: bool, ahead: Ahead | None = None) -> tuple[Any, ...]:
        """The flat outputs; by a recording of ``graphs`` where there is one."""
        if not self.is_recorded:
            return self.program.run(leaves)
        return graphs.run(self.program, leaves, self.region.is_random, is_part, ahead)
