"""One call form of a model, with its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from ...region import Region
from ..state.active_modes import default_device
from .cuda_graphs import Ahead, CudaGraphs
from .program import Program
from .program_errors import leave_to_original


@dataclass
class Variant:
    """One captured call form of the model and the program that serves it."""

    region: Region
    program: Program
    # The memory format of each image among the example's flat inputs; empty if none was channels-last. If one was, the
    # memory formats of the results depend on these formats.
    memory_formats: tuple[bool | str, ...] = ()
    # The strides of flat inputs whose memory layout is fixed, see ``Program.strides``.
    strides: list[Any] = field(default_factory=list)
    # Whether calls of this form run the program. They run the original forward where nothing is fused and no recording
    # makes the program faster.
    serves: bool = True

    def refusal(self, leaves: list[Any] | None) -> str | None:
        if leaves is None:
            return "other arguments"
        refusal = self.region.guard.refusal(leaves)
        if refusal is None and self.region.default_device not in (None, default_device()):
            return f"the default device is {default_device()}; at conversion it was {self.region.default_device}"
        if refusal is None and self.memory_formats and self.program.memory_formats(leaves) != self.memory_formats:
            return "the memory format of an image differs from the example's, which was channels-last"
        if refusal is None and self.strides and self.program.strides(leaves) != self.strides:
            return "argument strides differ from the example's, and the model's code depends on strides"
        return refusal

    @property
    def is_recorded(self) -> bool:
        """Whether CUDA graphs of it may be recorded. A cache argument has another length in each call, unless it is
        still empty. A recording runs the program more than once: other ranks, which may record at other times, would
        have to take part, and random numbers would be drawn more than once.
        """
        region = self.region
        return not (region.call.takes_filled_cache or region.communicates or region.is_random)

    @property
    def is_replayable(self) -> bool:
        """Whether CUDA graphs may replay its calls, or the steps of ``generate`` that use it."""
        return self.is_recorded or self.region.takes_static_cache

    def traced(self, leaves: list[Any]) -> Any:
        """Return the outputs of a region without caches, from fused modules on live tensors, for torch.export."""
        return pytree.tree_unflatten(self.program.traced(leaves), self.region.outputs.spec)

    def run(self, leaves: list[Any], passed: Sequence[Any] = ()) -> Any:
        """Return the outputs, and write to the ``passed`` caches, whose tensors are among ``leaves``."""
        return self.region.outputs.put_together(self.program.run(leaves), passed)

    def flat(
        self, leaves: list[Any], graphs: CudaGraphs | None = None, is_part: bool = False, ahead: Ahead | None = None
    ) -> tuple[Any, ...]:
        """Return the flat outputs, from a recording of ``graphs`` where there is one. Raises Fallback where the
        original forward must run."""
        try:
            if graphs is None or not self.is_recorded:
                return self.program.run(leaves)
            return graphs.run(self.program, leaves, is_part, ahead)
        except Exception as error:
            leave_to_original(error, self.region)
            raise
