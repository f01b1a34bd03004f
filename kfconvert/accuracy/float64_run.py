"""Outputs of a model in its dtype and in float64, which is the reference for the model and its conversion."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..inputs import copy_of, map_tensors, to_each
from ..known_libraries import is_of_libraries
from ..process import shard_of
from ..torch_state import without_autocast
from ..wrapped_tensors import is_dequantizable
from .cast_in_calls import WithoutHalf, bytes_in, cast_in_calls
from .copying import copied_model, tensors_of

# Models whose half-precision weights have more bytes in the reference's dtype share them with their copy.
_LARGE = 2**30


@dataclass(frozen=True)
class Reference:
    """Reference outputs, with a description of their origin."""

    outputs: Any
    description: str


def model_outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
    """Returns outputs of `model`, or of its `method`, in eval mode without gradients, on copies of the inputs.

    Training flags of all submodules and the random state are restored.
    """
    with evaluation(model):
        args, kwargs = tree_map(to_each(_fresh), (args, kwargs))
        return (model if method is None else getattr(model, method))(*args, **kwargs)


def reference_outputs(
    original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None
) -> Reference:
    """Returns outputs of a float64 copy of `original`, or of its `method`, on its device, with floating-point inputs in
    float64.

    If that fails because quantized weights do not support float64, plain weights with their values replace them. If it
    fails because the model casts to other dtypes, its casts use float64 as well. A model that does not support float64,
    or has no memory for it, runs in float32. If that is its dtype, or fails too, the unchanged model runs.
    All of these except the last run without autocast.
    `Reference.description` states which run was used and why.
    """
    runs: list[tuple[str, torch.dtype, Any, bool]] = [
        ("float64 run of the original", torch.float64, nullcontext, False),
        ("float64 run of the original and of its casts", torch.float64, _CastsToFloat64, False),
    ]
    if any(map(is_dequantizable, tensors_of(original))):
        runs.insert(1, ("float64 run of the original with dequantized weights", torch.float64, nullcontext, True))
    autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if autocast or any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors_of(original)):
        runs.append(("float32 run of the original", torch.float32, nullcontext, False))
    why = ""
    for description, dtype, context, dequantizes in runs:
        try:
            with context(), without_autocast():
                return Reference(_outputs_in(dtype, dequantizes, original, args, kwargs, method), description + why)
        except Exception as error:  # a forward may raise anything for a dtype; the first reason is reported
            why = why or f" (the float64 run failed: {one_line(error)})"
    return Reference(model_outputs(original, args, kwargs, method), f"original itself{why}")


def in_float64(dtype: Any) -> Any:
    """Returns float64 for a floating-point dtype, and any other value unchanged."""
    return torch.float64 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else dtype


def one_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _CastsToFloat64(TorchDispatchMode):
    """Mode that computes in float64 if a call names another floating-point dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A view as another dtype needs a dtype of the same width, and random numbers depend on the dtype.
        if func is not torch.ops.aten.view.dtype and torch.Tag.nondeterministic_seeded not in func.tags:
            args, kwargs = tree_map(in_float64, (args, kwargs))
        return func(*args, **kwargs)


def _fresh(leaf: Any) -> Any:
    """A copy of ``leaf``, because forwards may write to their inputs (in-place activations, caches)."""
    return copy_of(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _outputs_in(
    dtype: torch.dtype,
    dequantizes: bool,
    original: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str | None,
) -> Any:
    """The outputs of a copy of `original`, with its floating-point tensors and inputs in `dtype`. If `dequantizes`,
    plain weights replace the quantized ones. The copy of a large model shares its weights, if its code allows that."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

    args, kwargs = map_tensors(to_each(cast), (args, kwargs))
    if not dequantizes and bytes_in(original, dtype) > _LARGE and is_of_libraries(original):
        with suppress(Exception), WithoutHalf():  # a module may use the weights of another one
            lean, casting = partial(_sharing_weights, original, dtype), partial(cast_in_calls, dtype=dtype)
            return _outputs_of(lean, casting, args, kwargs, method)
    return _outputs_of(partial(_replica, original, dtype, dequantizes), nullcontext, args, kwargs, method)


def _outputs_of(
    make: Callable[[], nn.Module],
    context: Callable[[nn.Module], AbstractContextManager[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str | None,
) -> Any:
    """The outputs of the model that ``make`` returns, within its ``context``."""
    replica = make()
    remains = weakref.ref(replica)
    try:
        with context(replica):
            return model_outputs(replica, args, kwargs, method)
    finally:
        # The replica may have four times the model's size, so free its memory before candidates run.
        del replica
        if remains() is not None:
            gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _sharing_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A deep copy of `model` with the same parameters, if these have another dtype than `dtype`."""
    parameters = (each for each in model.parameters() if type(each) is nn.Parameter and each.is_floating_point())
    return copied_model(model, {id(each): each for each in parameters if each.dtype != dtype})


def _replica(model: nn.Module, dtype: torch.dtype, dequantizes: bool) -> nn.Module:
    """A deep copy of `model` in `dtype`, without an intermediate copy in the model's dtype."""
    tensors = {id(tensor): tensor for tensor in tensors_of(model) if tensor.is_floating_point()}
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        if type(tensor) is nn.Parameter or shard_of(tensor) is not None:
            memo[key] = nn.Parameter(tensor.detach().to(dtype, copy=True), tensor.requires_grad)
        elif type(tensor) is Tensor:
            memo[key] = tensor.detach().to(dtype, copy=True)
        elif dequantizes and is_dequantizable(tensor):
            values = tensor.detach().dequantize().to(dtype)
            memo[key] = nn.Parameter(values, False) if isinstance(tensor, nn.Parameter) else values
    duplicate = copied_model(model, memo)
    # A method that was assigned to the model, as accelerate does, would move the original.
    return type(duplicate).to(duplicate, dtype)


@contextmanager
def seeded(seed: int, tensors: Iterable[Any]) -> Iterator[None]:
    """Context manager that seeds the generators of the CPU, and of the GPUs with some of ``tensors``, and restores
    their states afterwards."""
    devices = {tensor.device.index for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Context manager for eval mode, no gradients, and reproducible random numbers. Restores training flags and random
    state."""
    flags = [(module, module.training) for module in model.modules()]
    with seeded(0, tensors_of(model)), torch.no_grad():
        if any(training for _, training in flags):
            model.eval()
        try:
            yield
        finally:
            if any(training for _, training in flags):
                model.train(flags[0][1])  # reverts effects of an overridden eval(), such as merged adapters
                for module, training in flags:
                    module.training = training


@contextmanager
def with_gradients() -> Iterator[None]:
    """Context manager for a forward with gradients enabled and without a backward: autograd keeps no saved tensors."""
    saving_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
    with torch.inference_mode(False), torch.enable_grad(), saving_nothing:
        yield
