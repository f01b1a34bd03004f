"""Families of compiled kernels for one device: functions of kfconvert.ops that never run plain ATen."""

import functools
import inspect
from collections.abc import Callable

from torch import Tensor

from .. import extension, ops
from ..ops.declaration import OPERATORS

NAMES = tuple(sorted(name for name, operator in OPERATORS.items() if operator.is_compiled))


def family(device_type: str) -> dict[str, Callable]:
    """Returns the functions by name, for ``"cpu"`` or ``"cuda"``."""
    return {name: _only(device_type, name, getattr(ops, name)) for name in NAMES}


def _only(device_type, name, operator):
    full_name = f"kfconvert.kernels.{device_type}.{name}"
    parameters = tuple(inspect.signature(operator).parameters)
    why_aten = OPERATORS[name].why_aten or (lambda *args, **kwargs: None)

    @functools.wraps(operator)
    def kernel(*args, **kwargs):
        if not (extension.CUDA_KERNELS_LOADED if device_type == "cuda" else extension.EXTENSION_LOADED):
            reason = extension.load_errors.get(device_type)
            raise RuntimeError(f"{full_name}: no compiled kernels: {reason}")
        for parameter, value in (*zip(parameters, args), *kwargs.items()):
            if isinstance(value, Tensor) and value.device.type != device_type:
                raise RuntimeError(f"{full_name}: {parameter} is on {value.device}")
        reason = why_aten(*args, **kwargs)
        if reason is not None:
            raise RuntimeError(f"{full_name}: {reason}; kfconvert.ops.{name} runs it on plain ATen")
        return operator(*args, **kwargs)

    kernel.__module__ = f"kfconvert.kernels.{device_type}"
    kernel.__doc__ = f"Calls only the compiled kernel of :func:`kfconvert.ops.{name}`.\n\n{operator.__doc__}"
    return kernel
