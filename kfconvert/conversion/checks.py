"""Checks of the arguments of a conversion; each raises one clear line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..runtime import function_mode


class ConversionError(ValueError):
    """Raised if the model, inputs, device or dtype do not allow the conversion. The message has one line."""


def check_thread() -> None:
    """Raises ConversionError inside a TorchFunctionMode, or with cached parametrizations: their effects would become
    part of the programs, which also serve calls outside of them."""
    mode = "parametrize.cached()" if parametrize._cache_enabled else function_mode()
    if mode is not None:
        raise ConversionError(f"exit the {mode} first: it must not be active in a conversion or load")


def check_arguments(progress: Any, inplace: Any, profile: Any) -> None:
    """Raises ConversionError unless ``progress`` is None or callable, and the others are booleans."""
    if progress is not None and not callable(progress):
        raise ConversionError(f"progress must be a function of (stage, done, total), not {progress!r}"[:300])
    for name, value in (("inplace", inplace), ("profile", profile)):
        if not isinstance(value, bool):
            raise ConversionError(f"{name} must be True or False, not {value!r}"[:300])


def check_callback(on_miss: Any) -> None:
    """Raises ConversionError unless ``on_miss`` is None or callable."""
    if on_miss is not None and not callable(on_miss):
        raise ConversionError(f"on_miss must be a function of a reason, not {on_miss!r}"[:300])


def check_model(model: Any) -> None:
    """Raises ConversionError if ``model`` cannot be converted."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module or a pipeline, got {type(model).__name__}")
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(f"{name} is TorchScript: convert the original module instead")
        if _is_compiled(module):
            raise ConversionError(f"{name} is compiled with torch.compile: convert the model first, then compile it")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # accelerate adds this attribute to modules whose weights it loads for each call.
        is_offloaded = any("_hf_hook" in vars(module) for module in model.modules())
        remedy = "load the model without offloading" if is_offloaded else "load its weights first"
        raise ConversionError(f"the model has tensors without data, on the device meta: {remedy}")


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module or its forward; copies would lose the compilation."""
    forward = vars(module).get("forward")
    return (
        type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def check_methods(model: Any, example_calls: Any) -> Mapping[str, Any]:
    """Returns ``example_calls`` if it maps names of public methods of ``model`` to inputs, and an empty dict for None.

    Raises:
        ConversionError: it is anything else.
    """
    if example_calls is None:
        return {}
    if not isinstance(example_calls, Mapping):
        raise ConversionError(f"example_calls must be a dict of method names and inputs, not {example_calls!r}"[:300])
    for name in example_calls:
        is_own = isinstance(name, str) and not name.startswith("_") and not hasattr(nn.Module, name)
        if not is_own or not callable(getattr(model, name, None)):
            reason = f"is not a public method of {type(model).__name__} other than forward and those of nn.Module"
            raise ConversionError(f"example_calls: {name!r} {reason}"[:300])
    return example_calls


def resolve_device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Returns ``device``, CUDA (if available) for "auto", or the model's device for None.

    Raises:
        ConversionError: there is no such device, or the model has several.
    """
    if device is None:
        parameters = model.parameters() if isinstance(model, nn.Module) else ()
        devices = list(dict.fromkeys(parameter.device for parameter in parameters))
        if len(devices) > 1:
            names = ", ".join(map(str, devices))
            raise ConversionError(f"the model has parameters on several devices ({names}): load it on one device")
        return devices[0] if devices else torch.device("cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConversionError(f"device {device} cannot be used: {first_line(error)}") from None
    if device.type == "meta":
        raise ConversionError("device meta cannot be used: it has no data")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an error's message, at most 300 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
