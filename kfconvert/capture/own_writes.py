"""Detects the writes of a forward to its own model that it reads again, by running it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..accuracy import model_outputs
from ..graph import place_now
from ..inputs import ExampleCall, bounded_lookups, is_equal, variations
from ..process import ThisThread, method_over
from ..region import CaptureError
from ..runtime import (
    OF_EVERY_MODULE,
    grouped_by_class,
    memory_of,
    reads_of_attributes,
    whole_walk,
)
from .submodule_calls import around

# The modules whose forwards were running, outermost first.
Running = tuple[nn.Module, ...]
# Where code reads an attribute: the offset of the instruction, or the name for getattr.
Place = tuple[CodeType, int | str]
Attribute = tuple[nn.Module, str]
# The times of a write.
ALWAYS, BY_SHAPE = "in every call", "when its input's shape changes"


@dataclass(frozen=True)
class Change:
    """A write of a forward, and its time; ``place``: its place in the code, as of ``graph.location``, or None."""

    name: str
    when: str
    place: str | None = None

    def error(self) -> CaptureError:
        return CaptureError(f"its forward changes {self.name} {self.when}", self.place)


@dataclass
class WrittenState:
    """``modules``: modules for which a graph would omit a write that a later call or the surrounding code depends on,
    each with the write. ``carried``: the names of state that is carried between calls: attributes of modules, and
    parameters and buffers whose memory the forward writes. ``assigned``: for each run, the call itself first, the
    assigned attributes. ``weights``: copies of parameters that only other sizes write, by name. ``read``: where the
    code behind the model reads attributes, by name, as far as it is reachable from the forwards of its modules."""

    modules: dict[nn.Module, Change] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)
    assigned: list[set[Attribute]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    read: dict[str, set[Place]] = field(default_factory=dict)


def written_state(model: nn.Module, call: ExampleCall, put_back: Callable[[], None]) -> WrittenState:
    """Run ``model`` with ``call`` and with other sizes, and return its writes. Call the model before, so that state
    from its first call is settled.

    An attribute of a module counts where the forward reads and then changes it, so that it depends on the previous
    call. It also counts where it is read after its writer has finished, or where code of other kinds of calls may read
    it. A parameter or buffer counts where its memory is written without a trace in graphs (through ``.data``, or by
    ``.data = ...``). An attribute that is assigned for other sizes only, such as a table for one shape, does not
    count: neither the example call nor a graph changes it.

    Args:
        put_back: called after each run to undo its writes.

    Raises:
        Exception: any error of the model for ``call``.
    """
    writes, by_shape = _MemoryWrites(model), _MemoryWrites(model)
    every = [_Accesses()]
    runs = every[:1]
    try:
        _run(model, call, writes, every[0])
    finally:
        put_back()
    for other in variations(call).values():
        every.append(_Accesses())
        try:
            with bounded_lookups(other.tensors()):
                _run(model, other, by_shape, every[-1])
            runs.append(every[-1])
        except Exception:  # the model does not support these sizes
            continue
        finally:
            by_shape.put_back(by_shape.names - writes.names)
            put_back()
    paths = {module: path for path, module in model.named_modules()}
    places = {place for run in runs for place in run.places}
    found = WrittenState(carried=set(writes.names), read=_places_read(model))
    found.assigned = [{each for each in run.by_name if each[0] in paths} for run in every]
    parameters = {name for name, _ in model.named_parameters()}
    found.weights = {name: by_shape.before[name] for name in by_shape.names - writes.names if name in parameters}
    for (module, name), access in runs[0].by_name.items():
        if module not in paths:  # created during the run
            continue
        met = [run.by_name[module, name] for run in runs if (module, name) in run.by_name]
        dotted = f"{paths[module]}.{name}" if paths[module] else name
        change = Change(dotted, ALWAYS, access.place)
        found.modules |= dict.fromkeys(access.read_elsewhere(), change)
        if not any(each.changed or not is_equal(each.value, access.value) for each in met):
            continue
        if any((module, name) in run.read_first for run in runs) or not found.read.get(name, set()) <= places:
            writers = (each for running in access.writes for each in running)
            found.modules |= dict.fromkeys(writers, change)
            found.carried.add(dotted)
    for noted, when in ((by_shape, BY_SHAPE), (writes, ALWAYS)):
        flagged = {module: Change("requires_grad of a tensor", when, place) for module, place in noted.flagged.items()}
        found.modules |= flagged
        for name, modules, place in noted.unseen:
            # Values derived from such a tensor would have to be computed again after every call.
            path, _, attribute = name.rpartition(".")
            change = Change(name, when, place)
            found.modules |= dict.fromkeys((*modules, *around(model, [(path, attribute)])), change)
    return found


def run_keeping(model: nn.Module, call: ExampleCall) -> dict[str, Tensor]:
    """Run ``model``, restore the parameters and buffers that it writes, and return copies of the new values."""
    writes = _MemoryWrites(model)
    with suppress(Exception):  # the model does not support this call
        _run(model, call, writes, _Accesses())
    writes.put_back(writes.names)
    return writes.before


def _places_read(model: nn.Module) -> dict[str, set[Place]]:
    """The places at which the code behind ``model`` reads attributes, by name, as far as that code is reachable from
    the forwards of its modules."""
    found: dict[str, set[Place]] = {}
    for code in whole_walk(model).codes():
        for name, offset in reads_of_attributes(code):
            found.setdefault(name, set()).add((code, name if offset is None else offset))
    return found


@dataclass
class _Access:
    """Reads and writes of one attribute in order, the place of its first write, and the last written value, if it is a
    number or the like."""

    changed: bool = False
    value: Any = None
    place: str | None = None
    writes: list[Running] = field(default_factory=list)
    reads_after: list[Running] = field(default_factory=list)

    def read_elsewhere(self) -> Iterator[nn.Module]:
        """The modules that write it, or contain a writer, and do not run where it is read."""
        for written in self.writes:
            yield from (module for module in written if any(module not in read for read in self.reads_after))


class _Accesses:
    """The accesses of one run: each written attribute; in ``read_first`` attributes read before a write or without one;
    and the places in the code of all reads."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.by_name: dict[Attribute, _Access] = {}
        self.read_first: set[Attribute] = set()
        self.places: set[Place] = set()

    def read(self, module: nn.Module, name: str, code: CodeType, offset: int) -> None:
        self.places |= {(code, offset), (code, name)}
        access = self.by_name.get((module, name))
        if access is None:
            self.read_first.add((module, name))
        elif tuple(self.running) not in access.reads_after:
            access.reads_after.append(tuple(self.running))

    def wrote(self, module: nn.Module, name: str, value: Any) -> None:
        before = _held(module, name)
        # An equal value, such as a size, may differ for other inputs.
        if value is before and not _is_plain(value):
            return
        access = self.by_name.setdefault((module, name), _Access(place=place_now()))
        access.writes.append(tuple(self.running))
        access.changed |= isinstance(value, Tensor) or not is_equal(value, before)
        access.value = value if _is_plain(value) else None


def assigned_in(model: nn.Module, call: ExampleCall) -> set[Attribute]:
    """Return the attributes of modules of ``model`` that ``call`` assigns. Raises any error of the model."""
    accesses = _Accesses()
    _run(model, call, _MemoryWrites(model), accesses)
    return set(accesses.by_name)


def _run(model: nn.Module, call: ExampleCall, writes: _MemoryWrites, accesses: _Accesses) -> None:
    """Run ``model`` and record its accesses and writes."""
    writes.running = accesses.running
    stored = _stored(model)
    with ExitStack() as stack:
        for own, modules in grouped_by_class(dict.fromkeys(model.modules())).items():
            stack.enter_context(_watched(own, modules, accesses))
        stack.enter_context(writes.noted())
        model_outputs(model, call.args, call.kwargs, call.method)
    for key, tensor in _stored(model).items():
        # Replaced by other means than assignment, such as register_buffer, at an unknown place.
        if key not in accesses.by_name and tensor is not stored.get(key):
            accesses.by_name[key] = _Access(changed=True, writes=[tuple(_enclosing(model, key[0]))])
            accesses.read_first.add(key)


def _stored(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor | None]:
    """The parameters and buffers by module and name."""
    stores = ((module, store) for module in model.modules() for store in (module._parameters, module._buffers))
    return {(module, name): tensor for module, store in stores for name, tensor in store.items()}


def _enclosing(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and the modules of ``model`` that contain it."""
    return (each for each in model.modules() if any(inner is module for inner in each.modules()))


@contextmanager
def _watched(own: type, modules: list[nn.Module], accesses: _Accesses) -> Iterator[None]:
    """Context manager that records in ``accesses`` the attribute accesses and runs of ``modules``, which are of the
    class ``own``."""
    running, here, ids = accesses.running, ThisThread(), set(map(id, modules))

    def reading(before: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(self: Any, name: str) -> Any:
            if running and id(self) in ids and name not in OF_EVERY_MODULE and not name.startswith("__") and here:
                frame = sys._getframe(1)
                accesses.read(self, name, frame.f_code, frame.f_lasti)
            return before(self, name)

        return read

    def writing(before: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        def write(self: Any, name: str, value: Any) -> None:
            if running and id(self) in ids and name not in OF_EVERY_MODULE and here:
                accesses.wrote(self, name, value)
            before(self, name, value)

        return write

    handles = []
    for module in modules:
        handles += [
            module.register_forward_pre_hook(lambda each, _: running.append(each), prepend=True),
            module.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True),
        ]
    with ExitStack() as stack:
        with suppress(TypeError):  # the class accepts no method
            stack.enter_context(method_over(own, "__getattribute__", reading))
            stack.enter_context(method_over(own, "__setattr__", writing))
        try:
            yield
        finally:
            here.over = True
            for handle in handles:
                handle.remove()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_plain, value))
    return type(value) in (int, float, bool, str)


def _held(module: nn.Module, name: str) -> Any:
    for store in (vars(module), module._buffers, module._parameters):
        if name in store:
            return store[name]
    return None


class _MemoryWrites:
    """Records calls that write to the memory of parameters and buffers of ``model``, or replace it. ``names`` has the
    names, ``unseen`` each write without a trace in the tensor, with the ``running`` modules and the place in the code.
    A graph records other writes, and is refused for them. ``before`` has copies of the previous contents. ``flagged``
    has the modules in which ``requires_grad`` of a tensor was set, and the places, which no graph records either."""

    def __init__(self, model: nn.Module):
        self.running: list[nn.Module] = []
        self.names: set[str] = set()
        self.before: dict[str, Tensor] = {}
        self.unseen: list[tuple[str, Running, str | None]] = []
        self.flagged: dict[nn.Module, str | None] = {}
        self._tensors = dict((*model.named_parameters(), *model.named_buffers()))

    @contextmanager
    def noted(self) -> Iterator[None]:
        self._look_up()
        with _Operators(self._written), _Setters(self._moved, self._flagged):
            yield

    @torch.no_grad()
    def put_back(self, names: Iterable[str]) -> None:
        for name in names:
            tensor, kept = self._tensors[name], self.before[name]
            if tensor.shape == kept.shape:
                tensor.copy_(kept)
            else:  # its memory was replaced
                tensor.data = kept.clone()

    def _look_up(self) -> None:
        self._by_memory: dict[Any, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._by_memory.setdefault(memory_of(tensor), []).append(name)

    def _written(self, target: Tensor, by_library: bool) -> None:
        memory = memory_of(target)
        for name in self._by_memory.get(memory, ()) if memory else ():
            self._note(name, unseen=by_library or target is not self._tensors[name])

    def _moved(self, target: Tensor) -> None:
        for name, tensor in self._tensors.items():
            if tensor is target:
                self._note(name, unseen=True)

    def _flagged(self) -> None:
        self.flagged |= dict.fromkeys(self.running, place_now())

    def _note(self, name: str, unseen: bool) -> None:
        if self.running:
            self.names.add(name)
            if name not in self.before:
                self.before[name] = self._tensors[name].detach().clone()
            self.unseen += [(name, tuple(self.running), place_now())] if unseen else []


class _Operators(TorchDispatchMode):
    """Calls ``written`` for each tensor that an operator writes; a flag marks fused ones, which leave no trace."""

    def __init__(self, written: Callable[[Tensor, bool], None]):
        super().__init__()
        self._tell = written

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        if schema.is_mutable:
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[index] if index < len(args) else kwargs.get(argument.name)
                    for target in value if isinstance(value, (list, tuple)) else [value]:
                        if isinstance(target, Tensor):
                            self._tell(target, schema.name.startswith("aten::_fused"))
        return function(*args, **kwargs)


class _Setters(TorchFunctionMode):
    """Calls ``moved`` for each assignment to ``data`` of a tensor, and ``flagged`` for ``requires_grad``."""

    def __init__(self, moved: Callable[[Tensor], None], flagged: Callable[[], None]):
        super().__init__()
        self._moved, self._flagged = moved, flagged

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == _SET_DATA:
            self._moved(args[0])
        elif function == _SET_REQUIRES_GRAD or getattr(function, "__name__", "") == "requires_grad_":
            self._flagged()
        return function(*args, **(kwargs or {}))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
