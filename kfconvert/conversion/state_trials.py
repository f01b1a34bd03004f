"""Trial runs that find the state which calls of a model change, and whether later calls read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..accuracy import is_close, model_outputs
from ..capture import TOLERANCES, around
from ..inputs import ExampleCall, bounded_lookups, resized, variations
from ..process import without_cudnn_attention
from ..runtime import fingerprints, whole_walk
from ..torch_state import is_dense
from .own_state import OwnState, Place, place_of


class Written:
    """Finds the modules of ``model`` that no graph may replace, as it would omit a write. Create it after the first
    call."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._parameters = {name: each for name, each in model.named_parameters() if not is_lazy(each)}
        self._fingerprints = fingerprints(self._parameters.values())

    @without_cudnn_attention()
    def by(self, call: ExampleCall, outputs: Any, own_state: OwnState) -> dict[nn.Module, str]:
        """Return these modules, each with the reason.

        No graph replaces a module that contains a place which changes in a second call with the same inputs. If a
        place changes in calls with other sizes, no graph replaces a submodule that contains it, as code outside of the
        submodule may read it; and none replaces the model, if outputs depend on the call before.

        Args:
            outputs: the outputs of the last call, which was ``call``.
            own_state: it is reset afterwards. It also resets the places that calls both change and read.
        """
        model = self._model
        again = self._outputs(call)
        every = own_state.changed() | self._written_parameters()
        own_state.carried |= every
        found = self._around(every, "in every call")
        if not _are_same(outputs, again) and not _are_same(again, self._outputs(call)):
            found.setdefault(model, "its outputs differ in calls with the same inputs")
        own_state.resettle()
        calls = [call, *_other_calls(call)]
        before, by_input = [], set[Place]()
        for number, each in enumerate(calls):
            before.append(self._outputs(each))
            by_input |= own_state.changed()
            if number == 1:  # the call with other values
                own_state.written |= {name for _, name in by_input | every}
        by_input -= every
        if by_input:
            after = [self._outputs(each) for each in reversed(calls)]
            is_read = not all(map(_are_same, before, reversed(after)))
            for module, reason in self._around(by_input, "for other inputs").items():
                if is_read or module is not model:
                    found.setdefault(module, f"{reason}, which a later call reads" if is_read else reason)
            own_state.carried |= by_input if is_read else set()
        own_state.resettle()
        return found

    def _outputs(self, call: ExampleCall) -> Any:
        """The flat outputs; None where the model does not support the call."""
        with suppress(Exception), bounded_lookups(call.tensors()):
            return model_outputs(self._model, call.args, call.kwargs, call.method)
        return None

    def _written_parameters(self) -> set[Place]:
        """The parameters whose elements have changed since construction."""
        now = fingerprints(self._parameters.values())
        return {place_of(name) for name, one, other in zip(self._parameters, self._fingerprints, now) if one != other}

    def _around(self, places: Iterable[Place], when: str) -> dict[nn.Module, str]:
        found: dict[nn.Module, str] = {}
        for path, name in sorted(places):
            for module, dotted in around(self._model, [(path, name)]).items():
                found.setdefault(module, f"its forward changes {dotted} {when}")
            if not path:
                for module in self._model.modules():
                    if name in whole_walk(module).containers:  # its code finds the name in the globals
                        found.setdefault(module, f"its forward changes {name} {when}")
        return found


def _other_calls(call: ExampleCall) -> Iterator[ExampleCall]:
    """``call`` with other values, and then with other sizes: 1, and one more."""
    yield call.map_tensors(_other_values)
    yield call.map_tensors(lambda tensor: tensor[:, :1] if is_dense(tensor) and tensor.dim() > 1 else tensor)
    with suppress(Exception):  # different sizes, or tensors that cannot be cut
        if any(tensor.dim() and tensor.shape[0] != 1 for tensor in call.tensors()):
            yield resized(call, 1, None)
    yield from variations(call).values()


def _other_values(tensor: Tensor) -> Tensor:
    if not is_dense(tensor) or tensor.dim() == 0:
        return tensor
    return tensor.flip(-1) * 0.5 if tensor.is_floating_point() else tensor[..., :1].expand_as(tensor)


def _are_same(outputs: Any, others: Any) -> bool:
    """Whether the tensors and numbers in two outputs agree up to rounding; None agrees with everything."""
    if outputs is None or others is None:
        return True
    (ours, spec), (theirs, other) = pytree.tree_flatten(outputs), pytree.tree_flatten(others)
    known = (Tensor, int, float, str)
    return spec == other and all(
        is_close(*each, TOLERANCES) for each in zip(ours, theirs) if isinstance(each[0], known)
    )
