"""The first step of a conversion: a separate model in eval mode on its device, and an example call that it accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import copied_model, model_outputs
from ..capture import ALWAYS, BY_SHAPE, Attribute, Change, WrittenState, around, run_keeping, written_state
from ..inputs import ExampleCall, InputError, Weighted, example_call, weighted
from ..runtime import UNKNOWN, Asked, named_by_code, originals, uninstall, unsteady
from .attribute_state import Kept, readers
from .checks import ConversionError, check_methods, first_line, resolve_device
from .own_state import OwnState
from .rollback import AsGiven, given_back_on_error


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``ModelConverter.convert_model`` that describe the model's device, dtype and inputs."""

    input_shape: Sequence[int] | None = None
    example_inputs: Any = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    inplace: bool = False
    tune_for: Sequence[Any] | None = None
    example_calls: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class Prepared:
    """The model to convert and its example call. ``outputs`` are the outputs of ``model`` for ``call``. ``counting``
    maps a module to a change that a captured graph would freeze: an attribute of it, or of a submodule, changes in each
    call of the same inputs, or carries a value between calls or out of the module. If a global changes, the module is
    the model. ``assigned`` are the attributes that ``call`` assigns, None if unknown. ``own_state`` restores the state
    that calls of a conversion change, ``settled`` to its value after the first calls. ``asked`` are the tensor
    properties that the code reads (see ``tensor_facts``), ``asked_within`` those per module. ``seconds`` is the
    processor time of one forward. ``methods`` are the example calls of other methods, with outputs, and ``tuned`` the
    calls to tune for, with weights. ``as_given`` restores a model that is converted in place. ``moved`` is the previous
    memory of parameters, which calls in other threads may still read."""

    model: nn.Module
    device: torch.device
    call: ExampleCall
    outputs: Any
    counting: dict[nn.Module, Change]
    assigned: set[Attribute] | None
    own_state: OwnState
    settled: OwnState
    asked: frozenset[str]
    asked_within: dict[nn.Module, set[str]]
    tuned: list[tuple[ExampleCall, float]]
    as_given: AsGiven | None
    seconds: float
    methods: list[tuple[ExampleCall, Any]] = field(default_factory=list)
    moved: list[Tensor] = field(default_factory=list)
    original: nn.Module | None = None

    def keep_original(self) -> None:
        """Set ``original`` to the unmodified model, for timing: the same tensors in another tree of modules. It stays
        None if the model cannot be copied. Call this before the programs are installed."""
        try:
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.original = copied_model(self.model, {id(tensor): tensor for tensor in tensors})
        except Exception:  # the model's own code may raise anything
            self.original = None

    def unsteady(self, module: nn.Module) -> str | None:
        """Returns why a graph of ``module`` would be wrong: its code reads tensor properties that no guard checks; None
        otherwise."""
        name = unsteady(self.asked_of(module))
        return None if name is None else f"its code reads {name} of a tensor, which differs between calls"

    def asked_of(self, module: nn.Module) -> frozenset[str]:
        """Returns the tensor properties that the code of ``module`` reads."""
        if UNKNOWN in self.asked:
            return self.asked
        return frozenset(self.asked_within.get(module, ())) | named_by_code(module)

    def run_original(self, call: Callable[[nn.Module], Any]) -> Any:
        """Returns the result of ``call`` on the model as it was before the conversion."""
        if self.original is not None:
            return call(self.original)
        with originals():  # includes the time of the guard
            return call(self.model)


def prepare(given: nn.Module, request: Request) -> Prepared:
    """Copies (unless ``inplace``), moves, and runs the model ``given``.

    Raises:
        ConversionError: the model cannot be copied, or does not accept the example call.
    """
    device, dtype = resolve_device(request.device, given), request.dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConversionError(f"dtype must be a floating-point dtype such as torch.float16, not {dtype!r}")
    loads, example_calls = _loads(request.tune_for), check_methods(given, request.example_calls)
    shape, inputs = request.input_shape, request.example_inputs
    if loads and shape is None and inputs is None:
        shape, inputs = _given(loads[0])
    model = given
    if not request.inplace:
        try:
            model = copied_model(given)
        except Exception as error:
            raise ConversionError(f"the model cannot be copied ({first_line(error)}); pass inplace=True") from error
    uninstall(model)
    moves = dtype is not None or _is_elsewhere(model, device)
    as_given = AsGiven(model, tensors=moves) if request.inplace else None
    with given_back_on_error(as_given):
        return _prepared(model, given, as_given, shape, inputs, device, dtype, loads, example_calls)


def _prepared(
    model: nn.Module,
    given: nn.Module,
    as_given: AsGiven | None,
    input_shape: Sequence[int] | None,
    example_inputs: Any,
    device: torch.device,
    dtype: torch.dtype | None,
    loads: list[Weighted],
    example_calls: Mapping[str, Any],
) -> Prepared:
    """Like ``prepare``, for ``model``: a copy of ``given``, or ``given`` itself, which ``as_given`` restores."""
    model = model.to(device, dtype).eval() if dtype else model.to(device).eval()
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    # Inputs keep their dtype; they are cast to the model's dtype only if the model does not accept them.
    dtypes = [dtype or own] if dtype or example_inputs is None else [None, own]
    try:
        calls = [example_call(model, input_shape, example_inputs, device, each) for each in dtypes]
        tuned = [[example_call(model, *_given(load), device, each) for each in dtypes] for load in loads]
        of_methods = [
            [replace(example_call(model, None, inputs, device, each), method=name) for each in dtypes]
            for name, inputs in example_calls.items()
        ]
    except InputError as error:
        raise ConversionError(str(error)) from None
    before = Kept(model)
    own_state = OwnState(model)
    try:
        # The initial values of the parameters, or of those that calls write.
        weights = run_keeping(model, calls[0]) if as_given else dict(given.named_parameters(remove_duplicate=False))
        start = time.thread_time()
        call, outputs = _accepted(model, calls)
        seconds = time.thread_time() - start
        own_state.settled(model)
        after = Kept(model)
        # A separate run: PyTorch's attention takes another path while a mode is active.
        asked = _asked(model, call)
        # A change only in the first call is a size or a flag that the model initializes.
        changed = around(model, after.changed(Kept(model))) if before.changed(after) else {}
        settled = OwnState(model)
        written = _written_state(model, call, settled)
        own_state.keep(model, written.carried, weights)
        for state in (own_state, settled):
            state.keep_weights(model, written.weights)
        counting = {module: Change(name, ALWAYS) for module, name in changed.items()}
        # A recorded run finds the place.
        counting |= {m: change for m, change in written.modules.items() if m not in counting or change.when == ALWAYS}
        assigned = written.assigned[0] if written.assigned else None
        methods = []
        for each in of_methods:
            method, found = _accepted(model, each)
            if isinstance(found, Iterator):
                raise ConversionError(f"example_calls: {type(model).__name__}.{method.method} returns an iterator")
            methods.append((method, found))
            own_state.settled(model)
            settled = OwnState(model)
            for module, names in _asked(model, method).within.items():
                asked.within[module] |= names
            settled.restore()
            written = _written_state(model, method, settled)
            # A change of the model by a method does not affect its forward.
            counting = {m: change for m, change in written.modules.items() if m is not model} | counting
            assigned = assigned | written.assigned[0] if assigned is not None and written.assigned else None
        accepted = []
        for load, each in zip(loads, tuned):
            accepted.append((_accepted(model, each)[0], load.weight))
            settled.restore()
        return Prepared(
            model=model,
            device=device,
            call=call,
            outputs=outputs,
            counting=counting,
            assigned=assigned,
            own_state=own_state,
            settled=settled,
            asked=frozenset(asked.names | named_by_code(model)),
            asked_within=asked.within,
            tuned=accepted,
            as_given=as_given,
            seconds=seconds,
            methods=methods,
        )
    except BaseException:
        own_state.restore()
        raise


def _asked(model: nn.Module, call: ExampleCall) -> Asked:
    """Returns the tensor properties that code reads in ``call``."""
    asked = Asked(model)
    try:
        with asked:
            model_outputs(model, call.args, call.kwargs, call.method)
    except Exception:  # such as torch.cond, which Dynamo runs with the mode
        asked.names.add(UNKNOWN)
    return asked


def _is_elsewhere(model: nn.Module, device: torch.device) -> bool:
    return any(tensor.device != device for tensor in (*model.parameters(), *model.buffers()))


def _loads(tune_for: Sequence[Any] | None) -> list[Weighted]:
    if tune_for is None:
        return []
    if not isinstance(tune_for, (list, tuple)) or not tune_for:
        raise ConversionError(f"tune_for must be a list of inputs, not {tune_for!r}"[:300])
    return [weighted(inputs) for inputs in tune_for]


def _given(load: Weighted) -> tuple[Sequence[int] | None, Any]:
    """Returns ``input_shape`` and ``example_inputs``, one of which is None."""
    return load.as_shape, load.inputs if load.as_shape is None else None


def _written_state(model: nn.Module, call: ExampleCall, settled: OwnState) -> WrittenState:
    """See ``capture.written_state``; includes the contents of containers and objects after calls with other sizes."""
    kept = []

    def put_back() -> None:
        kept.append(Kept(model))
        settled.restore()

    try:
        found = written_state(model, call, put_back)
    except Exception:  # its code may inspect itself, and raise anything
        return WrittenState()
    first, *others = kept
    paths = {module: path for path, module in model.named_modules()}
    assigned = [{(paths[module], name) for module, name in attributes} for attributes in found.assigned]
    written = {
        place
        for other, here in zip(others, assigned[1:])
        for place in first.written_into(other, found.read)
        if place not in here | assigned[0]
    }
    for path, name in sorted(written):
        modules = around(model, [(path, name)])
        if name in vars(model.get_submodule(path)):
            found.carried.add(f"{path}.{name}")
        elif not path:
            modules |= readers(model, name)
        found.modules |= {module: Change(dotted, BY_SHAPE) for module, dotted in modules.items()}
    return found


def _accepted(model: nn.Module, calls: list[ExampleCall]) -> tuple[ExampleCall, Any]:
    """Returns the first of ``calls`` that the model can run, and its outputs; an error has the reason of the last."""
    for call in calls:
        try:
            return call, model_outputs(model, call.args, call.kwargs, call.method)
        except Exception as error:  # the model's own code may raise anything
            # A variable for the error, in a frame that its traceback references, would keep the model alive.
            if call is calls[-1]:
                name = ".".join(filter(None, (type(model).__name__, call.method)))
                reason = f"{name} does not accept {call.summary()}: {first_line(error)}"
                raise ConversionError(reason) from error
    raise AssertionError("there is at least one call")
