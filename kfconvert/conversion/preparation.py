"""The first step of a conversion: a separate model in eval mode on its device, and an example call that it accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..accuracy import copied_model, model_outputs
from ..inputs import ExampleCall, InputError, Weighted, example_call, weighted
from ..runtime import originals, uninstall
from .checks import ConversionError, check_methods, first_line, resolve_device
from .own_state import OwnState
from .rollback import AsGiven, given_back_on_error
from .state_trials import Written


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
    maps a module that no graph may replace to the reason, see ``state_trials``. ``own_state`` restores the state that
    calls of a conversion change. ``seconds`` is the processor
    time of one forward. ``methods`` are the example calls of other methods, with outputs, and ``tuned`` the
    calls to tune for, with weights. ``as_given`` restores a model that is converted in place."""

    model: nn.Module
    device: torch.device
    call: ExampleCall
    outputs: Any
    counting: dict[nn.Module, str]
    own_state: OwnState
    tuned: list[tuple[ExampleCall, float]]
    as_given: AsGiven | None
    seconds: float
    methods: list[tuple[ExampleCall, Any]] = field(default_factory=list)
    original: nn.Module | None = None

    def keep_original(self) -> None:
        """Set ``original`` to the unmodified model, for timing: the same tensors in another tree of modules. It stays
        None if the model cannot be copied. Call this before the programs are installed."""
        try:
            tensors = (*self.model.parameters(), *self.model.buffers())
            self.original = copied_model(self.model, {id(tensor): tensor for tensor in tensors})
        except Exception:  # the model's own code may raise anything
            self.original = None

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
    moves = dtype is not None or any(tensor.device != device for tensor in (*model.parameters(), *model.buffers()))
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
    # A method that was assigned to the model, as accelerate does, would move the original of a copy.
    move = type(model).to
    model = (move(model, device, dtype) if dtype else move(model, device)).eval()
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
    # The initial values of the parameters, which only a copy has in other memory.
    own_state = OwnState(model, None if as_given else dict(given.named_parameters(remove_duplicate=False)))
    try:
        start = time.thread_time()
        call, outputs = _accepted(model, calls)
        seconds = time.thread_time() - start
        own_state.settled()
        written = Written(model)
        counting = written.by(call, outputs, own_state)
        methods = []
        for each in of_methods:
            method, found = _accepted(model, each)
            if isinstance(found, Iterator):
                raise ConversionError(f"example_calls: {type(model).__name__}.{method.method} returns an iterator")
            methods.append((method, found))
            own_state.settled()
            # A change of the model by a method does not affect its forward.
            changing = written.by(method, found, own_state)
            counting = {module: reason for module, reason in changing.items() if module is not model} | counting
        accepted = []
        for load, each in zip(loads, tuned):
            accepted.append((_accepted(model, each)[0], load.weight))
            own_state.resettle()
        return Prepared(
            model=model,
            device=device,
            call=call,
            outputs=outputs,
            counting=counting,
            own_state=own_state,
            tuned=accepted,
            as_given=as_given,
            seconds=seconds,
            methods=methods,
        )
    except BaseException:
        own_state.restore()
        raise


def _loads(tune_for: Sequence[Any] | None) -> list[Weighted]:
    if tune_for is None:
        return []
    if not isinstance(tune_for, (list, tuple)) or not tune_for:
        raise ConversionError(f"tune_for must be a list of inputs, not {tune_for!r}"[:300])
    return [weighted(inputs) for inputs in tune_for]


def _given(load: Weighted) -> tuple[Sequence[int] | None, Any]:
    """Returns ``input_shape`` and ``example_inputs``, one of which is None."""
    return load.as_shape, load.inputs if load.as_shape is None else None


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
