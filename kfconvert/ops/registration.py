"""How an operator becomes known to torch: schema, ATen composition, fake kernel, autograd and autocast.

The compiled libraries register kernels for the CPU and CUDA keys only; everything else is here, so that the
operators exist, with the same schemas, when no library is there. Every operator has a twin
``<name>_inference`` with the same kernels and no autograd layer: a Python autograd layer costs more than the
kernel of a small model, even under no_grad.
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import extension
from ..torch_state import being_traced, keeps_calls, transformed
from .arguments import named, require_tensors

LIBRARY = torch.library.Library("kfconvert", "DEF")

_TAGS = (torch.Tag.pt2_compliant_tag,)


def define(schema: str, composition: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Declares ``kfconvert::<schema>``; ``composition`` (plain ATen) serves devices without a kernel."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, composition, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kfconvert::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kfconvert, name).default


def define_with_twin(schema: str, composition: Callable, fake: Callable):
    """(operator, its ``_inference`` twin)"""
    operator = define(schema, composition, fake)
    name, _, rest = schema.partition("(")
    twin = define(f"{name}_inference({rest}", composition, fake)
    LIBRARY.impl(f"{name}_inference", torch.library.fallthrough_kernel, "Autograd")
    return operator, twin


def differentiate(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable) -> Callable:
    """Registers a gradient, as ``torch.library.register_autograd`` takes it; returns how to call it then.

    What is returned takes all arguments, by position. It goes to an autograd function at once where nothing
    is to see the operator or to change its arguments before: by way of the dispatcher, which calls back into
    Python for the autograd layer, a forward takes 30 us more and a backward 10.
    """
    name = operator.name()
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=LIBRARY)

    def forward(ctx, *args):
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*args)
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name.removeprefix("kfconvert::"), (torch.autograd.Function,), methods)
    return _at_once(operator, function.apply)


def _at_once(operator, differentiable):
    def call(*args):
        if being_traced() or transformed() or torch._C._is_any_autocast_enabled():
            return operator(*args)
        return differentiable(*args)

    return call


def differentiate_by_decomposition(operator: torch._ops.OpOverload, decomposition: Callable) -> Callable:
    """Where a gradient is needed the operator becomes the differentiable ``decomposition(*arguments)``.

    Returns how to call it then, as :func:`differentiate` does.
    """

    def autograd(keyset, *args):
        if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            return decomposition(*args)
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    LIBRARY.impl(operator.name().removeprefix("kfconvert::"), autograd, "Autograd", with_keyset=True)
    return _at_once(operator, decomposition)


def autocast(operators, cast: Callable, device_types=("cpu", "cuda")) -> None:
    """Under autocast the arguments go through ``cast(args, device_type)`` first."""
    for device_type in device_types:
        for operator in operators:
            kernel = _autocast_kernel(operator, cast, device_type)
            LIBRARY.impl(operator.name().removeprefix("kfconvert::"), kernel, f"Autocast{device_type.upper()}")


def _autocast_kernel(operator, cast, device_type):
    def kernel(*args):
        with torch.autocast(device_type, enabled=False):
            return operator(*cast(args, device_type))

    return kernel


def cast_floats(args, dtype: torch.dtype, device_type: str) -> tuple:
    """Float tensors (float64 excepted, as ATen's autocast does) on that device become ``dtype``."""
    return tuple(
        arg.to(dtype)
        if isinstance(arg, torch.Tensor)
        and arg.is_floating_point()
        and arg.dtype != torch.float64
        and arg.device.type == device_type
        else arg
        for arg in args
    )


def cast_to_lower(args, device_type: str) -> tuple:
    """The rule of matrix products and convolutions: everything in the autocast dtype."""
    return cast_floats(args, torch.get_autocast_dtype(device_type), device_type)


def cast_to_widest(args, device_type: str) -> tuple:
    """The rule of sums: everything in the widest dtype among the arguments."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return cast_floats(args, widest, device_type)


def has_kernels(x: torch.Tensor) -> bool:
    """Whether compiled kernels serve this call with x; if not, the public functions are their references."""
    try:
        loaded = (x.is_cpu and extension.EXTENSION_LOADED) or (x.is_cuda and extension.CUDA_KERNELS_LOADED)
    except AttributeError as error:
        raise named(error) from None
    return loaded and not transformed()


def wants_gradient(x, other=None, bias=None, residual=None) -> bool:
    """Whether autograd records a call with these tensors, of which all but x may be None, or may do so later, in a
    program that is made of the call now."""
    return records_gradient(x, other, bias, residual) or keeps_calls()


def records_gradient(x, other=None, bias=None, residual=None) -> bool:
    """Whether autograd records a call with these tensors, of which all but x may be None."""
    try:
        return torch.is_grad_enabled() and (
            x.requires_grad
            or (other is not None and other.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
        )
    except AttributeError as error:
        raise named(error) from None


def require(condition: bool, operator: str, message: str | Callable[[], str]) -> None:
    """The checks of the compiled kernels, for compositions and fake kernels: RuntimeError with one line.

    A function makes the message where it is needed only: torch.compile fixes the sizes that are in one.
    """
    if not condition:
        raise RuntimeError(f"kfconvert::{operator}: {message() if callable(message) else message}")


def require_float(operator: str, x: torch.Tensor) -> None:
    """x has a dtype that the kernels take."""
    try:
        floating = x.is_floating_point() and x.element_size() > 1
    except AttributeError as error:
        raise named(error) from None
    require(floating, operator, "expected float64, float32, float16 or bfloat16")


def require_same_device(operator, name, x, other, x_name="x"):
    """``other``, a tensor, is where x is."""
    require_tensors(other)
    require(other.device == x.device, operator, f"{name} is on another device than {x_name}")


def require_same_options(operator, name, x, other, x_name="x"):
    """The device and, outside of autocast (which aligns them), the dtype of ``other`` are those of x."""
    require_same_device(operator, name, x, other, x_name)
    require(
        other.dtype == x.dtype or torch.is_autocast_enabled(x.device.type),
        operator,
        f"{name} has another dtype than {x_name}",
    )
