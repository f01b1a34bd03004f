"""A rewritten region ready to run: its code, the live tensors that it reads, and the plans of its fused modules."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn, strided

from ...process import OF_SHARD, libraries, switched_off
from ...region import Place
from ...torch_state import without_autocast
from ...wrapped_tensors import Path, wrapping
from ..state.derived import Derived, Unchanged, finish, is_captured
from ..state.memory_layouts import memory_format_of, strides_of
from ..state.watch import ROOT, SIZE, Entry, Watch, flat_places, gather
from ..state.watched_places import OF_EXPORT
from ..state.weak_module import WeakModule
from .casts import Casts
from .program_errors import UnfitTensors
from .split import LEAST_BYTES, Call, Split, split_code

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, *OF_EXPORT)


class Plans(SimpleNamespace):
    """Plans by name of fused module: each is called as ``plan(*inputs)``."""

    recordings: Any = None  # CUDA graphs made with these plans, valid only with them
    # A compiled form of the program (``Generated``), and the tensors of these plans that it takes.
    held_by_compiled: tuple[Any, list[Tensor]] = (None, [])


class Program:
    """``run(leaves)`` computes the flat outputs from the flat inputs and the live tensors. Do not call it where
    autograd would record: plans read folded and packed copies of the weights.

    The code calls ``self.fused_<i>(...)``, where ``self`` is a namespace of plans instead of the original module. A
    plan is a call ``plan(*inputs)`` of a fused module with everything prepared: weights folded and packed, strategy
    chosen. Plans are valid until a tensor that they depend on changes, which one check per run detects. All tensors
    that the program reads must keep their class, dtype, device and shape.

    Args:
        model: the captured module; only a weak reference to it is kept.
        module: the code with its fused modules and subgraphs; it is taken apart.
        fused: names of the fused modules in ``module``.
        weights: places of the tensors that the code itself reads, its first arguments in this order.
        synced: pairs (place in the model, place in a fused module) of tensors to copy before a run.
        images: the flat inputs with 4 or more dimensions; there are plans for each of their layouts, with and without
            the libraries that can be turned off.
        laid_out: the flat inputs that must have the memory layout of the example: for some other layouts the original
            fails or reads other elements, and fused modules do not.
        inner: (place of a wrapper in the model, place of its inner tensor, path in the wrapper) to assign before a run.
        unread: places of tensors with which the program does not compute, and whose shape, dtype or device matter.
        casts: (place in the model, place of a copy, dtype) of the weights that autocast casts.
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
        inner: Sequence[tuple[Place, Place, Path]] = (),
        unread: Sequence[Place] = (),
        casts: Sequence[tuple[Place, Place, torch.dtype]] = (),
    ):
        self.fused, self._images, self.laid_out = fused, images, laid_out
        self.modules: dict[str, Any] = dict(module._modules)
        self.code = type(module).forward
        self._split = split_code(module)
        # ``self`` of the code during a trace: the fused modules themselves, without plans.
        self.modules_by_name = SimpleNamespace(**self.modules)
        # A graph and its module refer to each other, and would keep the weights until the garbage collector runs.
        module._modules.clear()
        self._root = WeakModule(model)
        held = [place for name in fused for place in self.modules[name].held_places()]
        sources = _distinct(place for name in fused for place in self.modules[name].places())
        weights = [_unrooted(place, model) for place in weights]
        self._sources, self._weights = len(sources), weights
        self._read = _distinct([*sources, *held, *weights, *(_unrooted(place, model) for place in unread)])
        self._synced: list[tuple[Any, Any]] = [(_unrooted(source, model), place) for source, place in synced]
        wrappers = {(id(store), key): (store, key) for (store, key), *_ in inner}
        numbers = {place: number for number, place in enumerate(wrappers)}
        self._outer = [_unrooted(place, model) for place in wrappers.values()]
        self._inner: list[tuple[int, Any, Callable[[Any], Any]]] = [
            (numbers[id(store), key], at, operator.attrgetter(".".join(path))) for (store, key), at, path in inner
        ]
        # Per wrapper, whether it is a distributed parameter.
        self._is_sharded = [False] * len(wrappers)
        for (store, key), _, path in inner:
            self._is_sharded[numbers[id(store), key]] |= path == OF_SHARD
        self._casts = Casts([(_unrooted(source, model), place, dtype) for source, place, dtype in casts])
        self._cast_kinds: list[Any] = [self._kind(tensor) for tensor in self._casts.sources(vars(model))]
        # The same places in the form that gather() takes; created on first use, see __getstate__.
        self._flat: tuple[tuple[Any, ...], ...] | None = None
        self._way: Watch | None = None
        self._derived = Derived()
        self._are_contents_recorded = False
        self._kinds: list[Any] = []
        # The attributes of the wrappers, besides inner tensors; created on first use, see __getstate__.
        self._metadata: Watch | None = None
        self._wrappings: list[Any] = []
        self._wrappings = self._wrapped_kinds()
        self._kinds = [self._kind(tensor) for tensor in self._tensors()]
        self._latest: weakref.ref[Plans] | None = None
        #: Compiled forms of the program (``Generated``), by the kind of call that they serve.
        self.generated: dict[Any, Any] = {}
        # Of a frozen program: its plans by layout, and the tensors of its code.
        self._kept: Any = None
        self._kept_weights: list[Tensor] = []

    @property
    def digest(self) -> str:
        """Equal for programs of the same code that read tensors of the same kinds."""
        code = self.code.__code__
        return sha256(f"{code.co_code!r} {code.co_names} {code.co_consts} {self._kinds}".encode()).hexdigest()

    def run(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Run the program. Raises UnfitTensors before any computation where a tensor has changed in kind."""
        return self.computed(self.plans(leaves), leaves)

    def plans(self, leaves: list[Any]) -> Plans:
        """Return the plans for the flat inputs ``leaves``, valid until a source tensor changes. Raises as ``run``."""
        derived = self._current()
        layout = (libraries(), *self.layout(leaves))
        plans = derived.get(layout)
        if plans is None:
            plans = derived[layout] = self._unplanned()
        self._latest = weakref.ref(plans)
        return plans

    def freeze(self) -> None:
        """Use the current tensors from now on, without further checks. Raises UnfitTensors."""
        kept = self._current()
        self._kept_weights = self.read_by_code()
        # Intermediate values behind the plans are no longer needed, and the sources must not be kept alive.
        self.clear()
        self._kept = kept

    def latest_plans(self) -> Plans | None:
        """The plans of the last run, which may be outdated."""
        return None if self._latest is None else self._latest()

    def computed(self, plans: Plans, leaves: list[Any]) -> tuple[Any, ...]:
        """Return the flat outputs, with ``plans`` that were just requested. The code has the casts of autocast, if any,
        and runs without it."""
        if torch._C._is_any_autocast_enabled():
            with without_autocast():
                return self.code(plans, *self.read_by_code(), *leaves)
        return self.code(plans, *self.read_by_code(), *leaves)

    def call(self, plans: Plans, outputs: Sequence[Any]) -> Call:
        """Return a call of ``computed`` with ``plans``, in two parts if the last of its ``outputs`` is large."""
        if (split := self.split(outputs)) is None:
            return partial(self.computed, plans)
        return split.with_plans(plans, lambda leaves: split.body(plans, *self.read_by_code(), *leaves))

    def split(self, outputs: Sequence[Any]) -> Split | None:
        """Return the code in two parts if its last call computes a large one of the flat ``outputs``; None under
        autocast, which would affect that call."""
        if (split := self._split) is None or torch._C._is_any_autocast_enabled():
            return None
        return split if outputs[split.inputs.start].nbytes >= LEAST_BYTES else None

    def generated_call(self, plans: Plans, kind: Any, leaves: list[Any]) -> Call | None:
        """Return a call of the compiled form for this kind of call with ``plans``; None if there is none."""
        generated = self.generated.get(kind)
        return None if generated is None else generated.call(self, plans, leaves)

    def read_by_code(self) -> list[Tensor]:
        """The tensors of the model that the code itself reads."""
        if self._kept is not None:
            return self._kept_weights
        return gather(self._places()[1], vars(self._root()))

    def may_read(self) -> bool:
        """Whether the modules whose tensors the code itself reads are unchanged: a new one may have more rows to look
        up. No argument indexes the tensors that plans hold."""
        root = self._root()
        if self._way is None:
            self._way = Watch(_way_to([store for store, _ in self._weights], root))
        return self._way.first_change(vars(root)) is None

    def traced(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return the flat outputs with calls that torch.export can trace: fused modules on the live tensors, without
        plans. Raises UnfitTensors where a tensor has changed in kind."""
        self._require_kinds(self._tensors())
        return self.code(self.modules_by_name, *gather(self._places()[1], vars(self._root())), *leaves)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the tensors of fused modules at the end, so that none of a trace remains."""
        before = [(store, key, store[key]) for _, (store, key) in self._synced]
        try:
            yield
        finally:
            for store, key, tensor in before:
                store[key] = tensor

    def layout(self, leaves: list[Any]) -> tuple[bool, ...]:
        """For each image among the flat inputs, whether it is contiguous."""
        return tuple([leaves[index].is_contiguous() for index in self._images])

    def memory_formats(self, leaves: list[Any]) -> tuple[bool | str, ...]:
        """The memory format of each image among the flat inputs."""
        return tuple([memory_format_of(leaves[index]) for index in self._images])

    def strides(self, leaves: list[Any]) -> list[Any]:
        """The strides of each flat input with a fixed memory layout, as ``strides_of`` returns them."""
        return [strides_of(leaves[index]) for index in self.laid_out]

    def record_contents(self, wanted: bool) -> None:
        """Whether to record the contents of the tensors that plans depend on, for ``drop_overwritten``."""
        self._are_contents_recorded = wanted
        if wanted:
            self._derived.note()
            self._casts.note()

    def drop_overwritten(self) -> None:
        """Drop all plans if a tensor was written without a trace since its content was recorded."""
        if self._derived.overwritten() or self._casts.overwritten():
            self.clear()

    def clear(self) -> None:
        """Drop all plans and everything that was derived from weights."""
        self._casts.clear()
        self._derived.clear()
        for name in self.fused:
            self.modules[name].clear_derived()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the model that the program reads, and the wrappers of its inner tensors. Raises
        UnfitTensors where one was removed or replaced by another kind of value."""
        found = [tensor for tensor in self._tensors() if tensor is not None]
        if not all(isinstance(tensor, Tensor) for tensor in found):
            self._require_kinds(self._tensors())
        return [*found, *self._wrappers(), *self._casts.sources(vars(self._root()))]

    def merged_weights(self) -> list[list[Tensor]]:
        """The weights of the model that a fused module reads as one tensor, for each such module; see ``merge``."""
        self._tensors()  # copies moved tensors over first
        return [weights for name in self.fused if (weights := self.modules[name].merged_weights())]

    def unchanged(self) -> Unchanged:
        """Return a check whether the tensors are unchanged. Raises UnfitTensors where one has no address."""
        tensors = self.tensors()
        try:
            return Unchanged(tensors)
        except RuntimeError:
            self._require_kinds(self._tensors())
            raise

    def _current(self) -> dict[Any, Plans]:
        """The plans by layout that are valid for the current tensors."""
        if (kept := self._kept) is not None:
            return dict(kept) if is_captured(kept.device) else kept
        tensors = self._tensors()
        # A write to a wrapper leaves no trace in its inner tensors.
        wrappers = self._wrappers() if self._inner else []
        # Classes of wrappers may handle each read of a property in Python.
        with torch._C.DisableTorchFunctionSubclass() if wrappers else nullcontext():
            return self._values_of([*wrappers, *tensors], len(wrappers) + self._sources, tensors)

    def _values_of(self, sources: Sequence[Any], versioned: int, tensors: Sequence[Any]) -> dict[Any, Plans]:
        return self._derived.values(
            sources,
            versioned=versioned,
            fingerprinted=self._are_contents_recorded,
            # A number that was assigned to an attribute has no device, and a sparse tensor no address.
            admit=lambda _: self._require_kinds(tensors),
        )

    def _wrappers(self) -> list[Tensor]:
        """The wrappers of the inner tensors that the program reads."""
        return gather(self._places()[3], vars(self._root()))

    def _tensors(self) -> list[Tensor | None]:
        """All tensors that the program reads, beginning with the sources of plans."""
        root = vars(self._root())
        read, _, synced, _ = self._places()
        try:
            if self._inner:
                self._take_inner_tensors()
            if self._cast_kinds:
                self._casts.refresh(root, self._are_contents_recorded, self._require_same_casts)
            for tensor, (_, (store, attribute)) in zip(gather(synced, root), self._synced):
                store[attribute] = tensor
            return gather(read, root)
        except KeyError as error:
            raise UnfitTensors(
                f"a parameter was removed after the conversion ({error}, as by weight_norm or pruning); "
                "convert it again"
            ) from None

    def _take_inner_tensors(self) -> None:
        wrappers = self._wrappers()
        if self._metadata is None or self._metadata.first_change() is not None:
            self._require_same_wrapping()
            self._metadata = Watch(_entries_of_metadata(wrappers))
        try:
            for index, (store, attribute), read in self._inner:
                store[attribute] = read(wrappers[index])
        except AttributeError:
            self._require_same_wrapping()
            raise

    def _wrapped_kinds(self) -> list[Any]:
        """What the program relies on in each wrapper; the shard of a distributed parameter is independent of it."""
        wrappers = self._wrappers() if self._outer else []
        return [type(each) if sharded else wrapping(each) for each, sharded in zip(wrappers, self._is_sharded)]

    def _require_same_wrapping(self) -> None:
        if self._wrapped_kinds() != self._wrappings:
            self._derived.clear()  # so that the next run checks again
            self._metadata = None
            raise UnfitTensors(
                "a distributed or quantized weight was replaced by one of another kind after the conversion; "
                "convert it again"
            )

    def _places(self) -> tuple[tuple[Any, ...], ...]:
        """The places of all tensors that are read, tensors that the code reads, tensors that are copied over, and
        wrappers."""
        if self._flat is None:
            found = (self._read, self._weights, [source for source, _ in self._synced], self._outer)
            self._flat = tuple(map(flat_places, found))
        return self._flat

    def __getstate__(self) -> dict[str, Any]:
        # The deep copy of a module has another __dict__ than the deep copy of its __dict__, and no attributes yet.
        thawed: dict[str, Any] = {"_kept": None, "_kept_weights": []}
        return {**self.__dict__, "_flat": None, "_way": None, "_metadata": None, "_latest": None, **thawed}

    def _require_same_casts(self, tensors: Sequence[Any]) -> None:
        if [self._kind(tensor) for tensor in tensors] != self._cast_kinds:
            raise UnfitTensors(
                "a weight was moved, or replaced by one of another class, shape or dtype; convert it again"
            )

    def _require_kinds(self, tensors: Sequence[Any]) -> None:
        self._require_same_wrapping()
        self._metadata = None  # a wrapper may have been replaced
        for (_, name), tensor, known in zip(self._read, tensors, self._kinds):
            kind = self._kind(tensor)
            if kind == known:
                continue
            self._derived.clear()  # so that the next run checks again
            if isinstance(tensor, Tensor) and known is not None and kind[:2] != known[:2]:
                raise UnfitTensors(f"the model was moved to {kind[0]} on {kind[1]}; convert it again")
            change = "was removed, or replaced by one of another class, shape or memory layout"
            raise UnfitTensors(f"the tensor {name} {change} after the conversion")

    def _kind(self, tensor: Any) -> Any:
        """The properties of a tensor that the program relies on. Plain classes count as one."""
        if not isinstance(tensor, Tensor):
            return None if tensor is None else type(tensor)
        plain = None if type(tensor) in _PLAIN else type(tensor)
        # Like images, the weights of convolutions determine the memory format of the outputs.
        is_image = self.laid_out and tensor.layout is strided and tensor.dim() >= 4
        strides = strides_of(tensor) if is_image else None
        return tensor.dtype, tensor.device, tensor.shape, tensor.layout, plain, strides

    def _unplanned(self) -> Plans:
        """Return plans that are created at their first call, from that call's inputs."""
        plans = Plans(**self.modules)
        for name in self.fused:
            setattr(plans, name, _first_call(plans, name, self.modules[name]))
        return plans


def _unrooted(place: Place, root: nn.Module) -> tuple[Any, str]:
    """ROOT instead of the model, which the program must not keep alive."""
    return (ROOT, place[1]) if place[0] is root else place


def _way_to(stores: list[Any], root: nn.Module) -> Iterator[Entry]:
    """Entries for the path from ``root`` to the modules that have ``stores``, or are among them."""
    wanted = set(map(id, stores))
    for path, module in root.named_modules():
        if wanted.isdisjoint(map(id, (module, module._parameters, module._buffers))):
            continue
        parent = root
        for name in path.split(".") if path else ():
            yield ROOT if parent is root else parent, "_modules", parent._modules
            yield parent._modules, name, parent._modules[name]
            parent = parent._modules[name]  # type: ignore[assignment]  # it is on the path to a module


def _entries_of_metadata(wrappers: Iterable[Tensor]) -> Iterator[Entry]:
    """Entries for the attributes of wrappers, except tensors: each call reads the inner tensors again."""
    for wrapper in wrappers:
        yield wrapper, SIZE, len(vars(wrapper))
        yield from ((wrapper, name, value) for name, value in vars(wrapper).items() if not isinstance(value, Tensor))


def _distinct(places: Iterable[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """The distinct places: modules that share a tensor, and sites that share a module, list a place repeatedly."""
    return list({(id(store), key): (store, key) for store, key in places}.values())


def _first_call(plans: Plans, name: str, module: Any) -> Callable[..., Any]:
    # Plans with a reference cycle would keep the weights if no call came.
    held_by = weakref.ref(plans)

    def call(*inputs: Tensor) -> Any:
        disturbed = switched_off()
        devices = (*(tensor.device for tensor in inputs), getattr(module, "device", None))
        device = next((device for device in devices if device is not None and device.type == "cuda"), None)
        plan = module.plan(*inputs)
        # A plan derives values on the current stream; calls on other streams must find them finished.
        if not (disturbed or switched_off() or is_captured(device)):
            finish(device)
            setattr(held_by(), name, plan)
            module.clear_derived()  # the plan holds what it needs, and not what that was derived from
        return plan(*inputs)

    return call
