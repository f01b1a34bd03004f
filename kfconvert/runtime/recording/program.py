"""A rewritten region ready to run: its code, the live tensors it reads, and the prepared calls of its fused modules."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn, strided

from ...process import libraries, shard_of, switched_off
from ...region import Place
from ..state.derived import Derived, Unchanged, finish, is_captured, memory_of
from ..state.fingerprint import may_fetch
from ..state.tensor_facts import memory_format_of, strides_of
from ..state.watch import ROOT, Entry, Watch, flat_places, gather
from ..state.watched_places import OF_EXPORT
from ..state.weak_module import WeakModule

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, *OF_EXPORT)


class UnfitTensors(RuntimeError):
    """A tensor of the model is not of the kind that a program was made for; the message says which and how."""


class Plans(SimpleNamespace):
    """By the names of fused modules, what each answers to ``plan(*inputs)``."""

    recordings: Any = None  # for whoever records calls by these plans: they are worth nothing without them


class Program:
    """``run(leaves)`` computes the flat outputs from the flat inputs and the live tensors. It must not be called
    where autograd would record: plans read folded and packed copies of the weights.

    The code calls ``self.fused_<i>(...)``. ``self`` is not the module that it was generated for but a namespace of
    plans: what each fused module answers to ``plan(*inputs)``, a call with everything prepared (weights folded and
    packed, strategy chosen). Plans hold until a tensor behind them changes, which is checked once a run for all of
    them together. All tensors that the program reads must stay of one class, dtype, device and shape.

    Args:
        model: the captured module, which is not kept alive.
        module: the code, and the fused modules and subgraphs that it calls; it is taken apart.
        fused: names of the fused modules in ``module``.
        weights: places of the tensors that the code itself reads, its first arguments in this order.
        synced: (place in the model, place in a fused module): tensors to copy over before a run.
        images: which of the flat inputs have 4 or more dimensions; there are plans for each of their layouts,
            with and without the libraries that may be turned off.
        laid_out: which of the flat inputs have to lie in memory as those of the example: the original fails for some
            others, or reads something else, where fused modules do not.
        shards: (place of a distributed parameter in the model, place of its shard): shards to put there before a run.
    """

    def __init__(
        self,
        model: nn.Module,
        module: fx.GraphModule,
        fused: list[str],
        weights: list[Place],
        synced: list[tuple[Place, Place]],
        images: tuple[int, ...],
        laid_out: tuple[int, ...] = (),
        shards: Sequence[tuple[Place, Place]] = (),
    ):
        self.fused, self._images, self.laid_out = fused, images, laid_out
        self.modules: dict[str, Any] = dict(module._modules)
        self.code = type(module).forward
        # What the code calls ``self`` in a trace: the fused modules themselves, without plans.
        self.modules_by_name = SimpleNamespace(**self.modules)
        # A graph and its module refer to each other, and would keep the weights until the cyclic collector comes by.
        module._modules.clear()
        self._root = WeakModule(model)
        held = [place for name in fused for place in self.modules[name].held_places()]
        sources = _distinct(place for name in fused for place in self.modules[name].places())
        weights = [_unrooted(place, model) for place in weights]
        self._sources, self._weights = len(sources), weights
        self._read = _distinct([*sources, *held, *weights])
        self._synced: list[tuple[Any, Any]] = [(_unrooted(source, model), place) for source, place in synced]
        self._shards: list[tuple[Any, Any]] = [(_unrooted(source, model), place) for source, place in shards]
        # The same places as gather() takes them; made when they are first needed, see __getstate__.
        self._flat: tuple[tuple[Any, ...], ...] | None = None
        self._way: Watch | None = None
        self._kinds = [self._kind(tensor) for tensor in self._tensors()]
        self._derived = Derived()
        # Tensors whose memory is shared with a tensor that plans depend on, these included, each with the version that
        # it had.
        self._sharing: list[tuple[Tensor, int]] = []
        self._check_weights = self._unchecked = 0
        self._latest: weakref.ref[Plans] | None = None
        # Of a frozen program: its plans by layout, what its code reads, what is to be called before others are made.
        self._kept: Any = None
        self._kept_weights: list[Tensor] = []
        self._before_planning: Callable[[], None] | None = None

    def run(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Raises UnfitTensors, before anything is computed, where a tensor of the model has become of another kind."""
        return self.computed(self.plans(leaves), leaves)

    def plans(self, leaves: list[Any]) -> Plans:
        """Those for the flat inputs ``leaves``, which hold until a tensor behind them changes. Raises as ``run``."""
        derived = self._current()
        layout = (libraries(), *self.layout(leaves))
        plans = derived.get(layout)
        if plans is None:
            if self._before_planning is not None:
                self._before_planning()
            plans = derived[layout] = self._unplanned()
        self._latest = weakref.ref(plans)
        return plans

    def freeze(self, before_planning: Callable[[], None]) -> None:
        """From now on the tensors are taken for what they are now, and not looked at any more. Raises UnfitTensors.

        ``before_planning`` is called where inputs of another layout come, for which nothing was prepared yet."""
        kept = self._current()
        self._kept_weights = self.read_by_code()
        # What was derived on the way to the plans is not needed any more, and the sources are not to be kept alive.
        self.clear()
        self._kept, self._before_planning = kept, before_planning

    def kept_plans(self) -> list[Plans]:
        """Those of a frozen program, one for each layout of inputs that came so far."""
        return list((self._kept or {}).values())

    def latest_plans(self) -> Plans | None:
        """Those that the last run was made with, which need not hold any more."""
        return None if self._latest is None else self._latest()

    def computed(self, plans: Plans, leaves: list[Any]) -> tuple[Any, ...]:
        """The flat outputs, by ``plans`` that were just asked for."""
        return self.code(plans, *self.read_by_code(), *leaves)

    def read_by_code(self) -> list[Tensor]:
        """The tensors of the model that the code itself reads."""
        if self._kept is not None:
            return self._kept_weights
        return gather(self._places()[1], vars(self._root()))

    def may_read(self) -> bool:
        """Whether the modules whose tensors the code itself reads are where they were: a new one may have more rows to
        look up. The tensors that plans hold are looked up by no argument."""
        root = self._root()
        if self._way is None:
            self._way = Watch(_way_to([store for store, _ in self._weights], root))
        return self._way.first_change(vars(root)) is None

    def traced(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The flat outputs, from calls that torch.export can trace: of fused modules on the live tensors, without
        plans. Raises UnfitTensors where a tensor is of another kind."""
        self._require_kinds(self._tensors())
        return self.code(self.modules_by_name, *gather(self._places()[1], vars(self._root())), *leaves)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager after which fused modules hold the tensors that they held before, and none of a trace."""
        before = [(store, key, store[key]) for _, (store, key) in self._synced]
        try:
            yield
        finally:
            for store, key, tensor in before:
                store[key] = tensor

    def layout(self, leaves: list[Any]) -> tuple[bool, ...]:
        """Of each image among the flat inputs, whether it is contiguous."""
        return tuple([leaves[index].is_contiguous() for index in self._images])

    def memory_formats(self, leaves: list[Any]) -> tuple[bool | str, ...]:
        """Of each image among the flat inputs, its memory format."""
        return tuple([memory_format_of(leaves[index]) for index in self._images])

    def strides(self, leaves: list[Any]) -> list[tuple[int, tuple[int, ...], Any]]:
        """Of each flat input that has to lie as it does in ``leaves``: its index, and what ``lies_as`` compares."""
        return [(index, leaves[index].stride(), strides_of(leaves[index])) for index in self.laid_out]

    def check_weights(self, runs: int) -> None:
        """From now on, compare the tensors that plans depend on with what they hold now after every ``runs`` runs; 0
        for never."""
        self._check_weights, self._unchecked = runs, 0
        if runs:
            self._derived.note()

    def clear(self) -> None:
        """Forget all plans and what the fused modules derived from their weights."""
        self._derived.clear()
        for name in self.fused:
            self.modules[name].clear_derived()

    def tensors(self) -> list[Tensor]:
        """The tensors of the model that the program reads, and the distributed parameters whose shards are among them.
        Raises UnfitTensors where one was removed, or something else was put in its place."""
        found = [tensor for tensor in self._tensors() if tensor is not None]
        if not all(isinstance(tensor, Tensor) for tensor in found):
            self._require_kinds(self._tensors())
        return [*found, *self._distributed()]

    def merged_weights(self) -> list[list[Tensor]]:
        """The weights of the model that a fused module reads as one tensor, for each that does; see ``merge``."""
        self._tensors()  # those that lie elsewhere are copied over before the fused modules are asked
        return [weights for name in self.fused if (weights := self.modules[name].merged_weights())]

    def unchanged(self) -> Unchanged:
        """Tells later whether the tensors are still as they are now. Raises UnfitTensors where one has no address."""
        tensors = self.tensors()
        try:
            return Unchanged(tensors)
        except RuntimeError:
            self._require_kinds(self._tensors())
            raise

    def _current(self) -> dict[Any, Plans]:
        """The plans, by layout, that hold for the tensors as they are."""
        if (kept := self._kept) is not None:
            return dict(kept) if is_captured(kept.device) else kept
        tensors = self._tensors()
        if any(tensor._version != version for tensor, version in self._sharing):
            self.clear()
        derived = self._values(tensors)
        if not derived:
            self._sharing = self._in_memory_of(tensors[: self._sources])
        elif self._check_weights and self._written_unseen():
            self.clear()
            derived = self._values(tensors)
        return derived

    def _values(self, tensors: list[Tensor | None]) -> dict[Any, Plans]:
        # A number that was assigned to an attribute has no device to ask for, and a sparse tensor no address.
        return self._derived.values(
            tensors,
            versioned=self._sources,
            fingerprinted=self._check_weights > 0,
            admit=self._require_kinds,
        )

    def _in_memory_of(self, tensors: list[Tensor | None]) -> list[tuple[Tensor, int]]:
        """Those of ``tensors`` that share memory with others of the model, and these others, with their versions. What
        is written through one may leave no trace in another: after ``b.weight.data = a.weight.data`` each has a version
        counter of its own, and so have a distributed parameter and its shard."""
        model = self._root()
        found = {id(t): t for t in (*tensors, *model.parameters(), *model.buffers()) if t is not None}
        users = Counter(map(memory_of, found.values()))
        read = {memory_of(tensor) for tensor in tensors if tensor is not None}
        shared = {memory for memory in read if users[memory] > 1}
        return [(t, t._version) for t in found.values() if not t.is_inference() and memory_of(t) in shared]

    def _distributed(self) -> list[Tensor]:
        """The distributed parameters whose shards the program reads."""
        return gather(self._places()[3], vars(self._root()))

    def _written_unseen(self) -> bool:
        self._unchecked += 1
        if self._unchecked < self._check_weights or not may_fetch():
            return False
        self._unchecked = 0
        return self._derived.overwritten()

    def _tensors(self) -> list[Tensor | None]:
        """All tensors that the program reads; those that plans hold on to come first."""
        root = vars(self._root())
        read, _, synced, _ = self._places()
        try:
            if self._shards:
                self._take_shards()
            for tensor, (_, (store, attribute)) in zip(gather(synced, root), self._synced):
                store[attribute] = tensor
            return gather(read, root)
        except KeyError as error:
            raise UnfitTensors(
                f"a parameter was removed after the conversion ({error}, as by weight_norm or pruning); "
                "convert it again"
            ) from None

    def _take_shards(self) -> None:
        for tensor, (_, (store, attribute)) in zip(self._distributed(), self._shards):
            store[attribute] = shard_of(tensor)
            if store[attribute] is None:
                raise UnfitTensors("a distributed parameter was replaced after the conversion; convert it again")

    def _places(self) -> tuple[tuple[Any, ...], ...]:
        """Of all tensors that are read, of those that the code reads, of those that are copied over, and of distributed
        parameters."""
        if self._flat is None:
            sources = ([source for source, _ in pairs] for pairs in (self._synced, self._shards))
            found = (self._read, self._weights, *sources)
            self._flat = tuple(map(flat_places, found))
        return self._flat

    def __getstate__(self) -> dict[str, Any]:
        # A deep copy of a module has another __dict__ than the deep copy of its __dict__, and no attributes yet.
        thawed: dict[str, Any] = {"_kept": None, "_kept_weights": [], "_before_planning": None}
        return {**self.__dict__, "_flat": None, "_way": None, "_latest": None, **thawed}

    def _require_kinds(self, tensors: Sequence[Any]) -> None:
        for (_, name), tensor, known in zip(self._read, tensors, self._kinds):
            kind = self._kind(tensor)
            if kind == known:
                continue
            self._derived.clear()  # so that the next run looks again
            if kind is None or known is None:
                change = "removed" if kind is None else "added"
                raise UnfitTensors(f"the tensor {name} was {change} after the conversion")
            if isinstance(tensor, Tensor) and kind[:2] != known[:2]:
                raise UnfitTensors(f"the model was moved to {kind[0]} on {kind[1]}; convert it again")
            if isinstance(tensor, Tensor) and kind[2] != known[2]:
                sizes = f"{list(kind[2])} instead of {list(known[2])}"
                raise UnfitTensors(f"the sizes of the tensor {name} changed after the conversion: {sizes}")
            if kind[:5] == known[:5]:
                raise UnfitTensors(f"the memory layout of the tensor {name} changed after the conversion")
            raise UnfitTensors(f"the tensor {name} was replaced by a {type(tensor).__name__}")

    def _kind(self, tensor: Any) -> tuple[Any, ...] | None:
        kind = _kind(tensor)
        # As images do, the weights of convolutions decide how these lay out what they return.
        if self.laid_out and isinstance(tensor, Tensor) and tensor.layout is strided and tensor.dim() >= 4:
            return *(kind or ()), strides_of(tensor)
        return kind

    def _unplanned(self) -> Plans:
        """Plans that make themselves at their first call, from the inputs that come then."""
        plans = Plans(**self.modules)
        for name in self.fused:
            setattr(plans, name, _first_call(plans, name, self.modules[name]))
        return plans


def _unrooted(place: Place, root: nn.Module) -> tuple[Any, str]:
    """ROOT in place of the model, which the program must not hold."""
    return (ROOT, place[1]) if place[0] is root else place


def _way_to(stores: list[Any], root: nn.Module) -> Iterator[Entry]:
    """What is on the way from ``root`` to the modules that have ``stores``, or are among them."""
    wanted = set(map(id, stores))
    for path, module in root.named_modules():
        if wanted.isdisjoint(map(id, (module, module._parameters, module._buffers))):
            continue
        parent = root
        for name in path.split(".") if path else ():
            yield ROOT if parent is root else parent, "_modules", parent._modules
            yield parent._modules, name, parent._modules[name]
            parent = parent._modules[name]  # type: ignore[assignment]  # it is on the way to a module


def _distinct(places: Iterable[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Modules that share a tensor, and sites that share a module, name its place more than once."""
    return list({(id(store), key): (store, key) for store, key in places}.values())


def _kind(tensor: Any) -> tuple[Any, ...] | None:
    """What a program relies on of a tensor: dtype, device, shape, layout and class; all plain classes count as one."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        return type(tensor), None, ()
    plain = None if type(tensor) in _PLAIN else type(tensor)
    return tensor.dtype, tensor.device, tensor.shape, tensor.layout, plain


def lies_as(leaves: list[Any], strides: list[tuple[int, tuple[int, ...], Any]]) -> bool:
    """Whether the flat inputs lie in memory as those that ``Program.strides`` was asked with, whose free sizes may be
    others."""
    for index, known, expected in strides:
        leaf = leaves[index]
        if leaf.stride() == known or (expected is True and leaf.dim() < 4 and leaf.is_contiguous()):
            continue
        if strides_of(leaf) != expected:
            return False
    return True


def _first_call(plans: Plans, name: str, module: Any) -> Callable[..., Any]:
    # Plans that held themselves by a call that never came would keep the weights.
    held_by = weakref.ref(plans)

    def call(*inputs: Tensor) -> Any:
        disturbed = switched_off()
        device = next((tensor.device for tensor in inputs if tensor.is_cuda), None)
        plan = module.plan(*inputs)
        # What a plan derives from weights is computed on the current stream: calls on others must find it finished.
        if not (disturbed or switched_off() or is_captured(device)):
            finish(device)
            setattr(held_by(), name, plan)
        return plan(*inputs)

    return call
