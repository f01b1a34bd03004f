"""A rewritten region ready to run: its code, the live tensors it reads, and the prepared calls of its fused modules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx

from .modules.derived import Derived
from .watch import flat_places, gather

# (dict that holds a tensor of the model, key in it)
Place = tuple[dict[str, Any], str]


class Program:
    """``run(leaves)`` computes the flat outputs from the flat inputs and the live tensors. It must not be called
    where autograd would record: plans read folded and packed copies of the weights.

    The code calls ``self.fused_<i>(...)``. ``self`` is not the module that it was generated for but a namespace of
    plans: what each fused module answers to ``plan(*inputs)``, a call with everything prepared (weights folded and
    packed, strategy chosen). Plans hold until a tensor behind them changes, which is checked once a run for all of
    them together.

    Args:
        module: the code, and the fused modules and subgraphs that it calls.
        fused: names of the fused modules in ``module``.
        weights: places of the tensors that the code itself reads, its first arguments in this order.
        synced: (place in the model, place in a fused module): tensors to copy over before a run.
        images: which of the flat inputs have 4 or more dimensions; there are plans for each of their layouts.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        fused: list[str],
        weights: list[Place],
        synced: list[tuple[Place, Place]],
        images: tuple[int, ...],
    ):
        self.module, self.fused, self.synced, self._images = module, fused, synced, images
        places = [place for name in fused for place in getattr(module, name).places()]
        # Modules that share a tensor, and sites that share a module, name its place more than once.
        distinct = {(id(store), key): (store, key) for store, key in places}
        self._sources, self._weights = flat_places(distinct.values()), flat_places(weights)
        self._derived = Derived()

    def run(self, leaves: list[Any]) -> tuple[Any, ...]:
        for (source, key), (store, attribute) in self.synced:
            store[attribute] = source[key]
        derived = self._derived.values(gather(self._sources))
        layout = tuple([leaves[index].is_contiguous() for index in self._images])
        plans = derived.get(layout)
        if plans is None:
            plans = derived[layout] = self._unplanned()
        code = type(self.module).forward
        return code(plans, *gather(self._weights), *leaves)

    def clear(self) -> None:
        """Forget all plans and what the fused modules derived from their weights."""
        self._derived.clear()
        for name in self.fused:
            getattr(self.module, name).clear_derived()

    def _unplanned(self) -> SimpleNamespace:
        """Plans that make themselves at their first call, from the inputs that come then."""
        plans = SimpleNamespace(**dict(self.module.named_children()))
        for name in self.fused:
            setattr(plans, name, _first_call(plans, name, getattr(self.module, name)))
        return plans


def _first_call(plans: SimpleNamespace, name: str, module: Any) -> Callable[..., Any]:
    def call(*inputs: Tensor) -> Any:
        plan = module.plan(*inputs)
        setattr(plans, name, plan)
        return plan(*inputs)

    return call
