"""Registration of operators in PyTorch: schema, ATen composition, fake kernel, autograd and autocast.

The compiled libraries only register kernels for the CPU and CUDA keys. All other registrations are here, so that the
operators exist with the same schemas without the libraries. Every operator has a twin ``<name>_inference`` with the
same kernels and no autograd layer, because a Python autograd layer costs more than a kernel of a small model, even
under no_grad.
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import extension
from ..torch_state import being_traced, keeps_calls, transformed

LIBRARY = torch.library.Library("kfconvert", "DEF")

_TAGS = (torch.Tag.pt2_compliant_tag,)


def define(schema: str, composition: Callable, fake: Callable | None = None) -> torch._ops.OpOverload:
    """Declares ``kfconvert::<schema>``; ``composition`` (plain ATen) serves devices without a kernel, and tracers
    without ``fake``."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, composition, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kfconvert::{name}", fake or composition, lib=LIBRARY)
    return getattr(torch.ops.kfconvert, name).default


def define_with_twin(schema: str, composition: Callable, fake: Callable | None = None):
    """Declares an operator and its ``_inference`` twin, and returns both."""
    operator = define(schema, composition, fake)
    name, _, rest = schema.partition("(")
    twin = define(f"{name}_inference({rest}", composition, fake)
    LIBRARY.impl(f"{name}_inference", torch.library.fallthrough_kernel, "Autograd")
    return operator, twin


def differentiate(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable) -> Callable:
    """Registers a gradient like ``torch.library.register_autograd``, and returns a function for calls with gradients.

    The function takes all arguments by position. It calls an autograd function directly if no mode must see the
    operator or change its arguments. The dispatcher, which calls back into Python for the autograd layer, would add
    30 us to a forward and 10 us to a backward.
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
    """Replaces the operator with the differentiable ``decomposition(*arguments)`` if a gradient is needed.

    Returns a function for calls with gradients, see :func:`differentiate`.
    """

    def autograd(keyset, *args):
        if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            return decomposition(*args)
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    LIBRARY.impl(operator.name().removeprefix("kfconvert::"), autograd, "Autograd", with_keyset=True)
    return _at_once(operator, decomposition)


def autocast(operators, cast: Callable, device_types=("cpu", "cuda")) -> None:
    """Applies ``cast(args, device_type)`` to the arguments under autocast."""
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
    """Casts float tensors on the device to ``dtype``, except float64, like ATen's autocast."""
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
    """Applies the rule of matrix products and convolutions: casts to the autocast dtype."""
    return cast_floats(args, torch.get_autocast_dtype(device_type), device_type)


def cast_to_widest(args, device_type: str) -> tuple:
    """Applies the rule of sums: casts to the widest dtype among the arguments."""
    dtypes = [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return cast_floats(args, widest, device_type)


def cast_as_norms(args, device_type: str) -> tuple:
    """Applies the rule of softmax and group norm: float32 on CUDA, the widest dtype on the CPU."""
    if device_type == "cuda":
        return cast_floats(args, torch.float32, device_type)
    return cast_to_widest(args, device_type)


def has_kernels(x: torch.Tensor) -> bool:
    """Whether compiled kernels run calls with x. If not, the public functions call their references."""
    loaded = (x.is_cpu and extension.EXTENSION_LOADED) or (x.is_cuda and extension.CUDA_KERNELS_LOADED)
    return loaded and not transformed()


def wants_gradient(x, other=None, bias=None, residual=None) -> bool:
    """Whether autograd records a call with these tensors (None is allowed except for x), or may record it later in a
    program that is traced now."""
    return records_gradient(x, other, bias, residual) or keeps_calls()


def records_gradient(x, other=None, bias=None, residual=None) -> bool:
    """Whether autograd records a call with these tensors (None is allowed except for x)."""
    return torch.is_grad_enabled() and (
        x.requires_grad
        or (other is not None and other.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )


def require(condition: bool, operator: str, message: str | Callable[[], str]) -> None:
    """Raises a one-line RuntimeError unless ``condition``: the checks of compiled kernels for compositions and fakes.

    The message may be a function, because torch.compile specializes on sizes in a formatted message.
    """
    if not condition:
        raise RuntimeError(f"kfconvert::{operator}: {message() if callable(message) else message}")


def require_float(operator: str, x: torch.Tensor) -> None:
    """Raises RuntimeError unless the kernels accept x's dtype."""
    require(x.is_floating_point() and x.element_size() > 1, operator, "expected float64, float32, float16 or bfloat16")


def require_same_device(operator, name, x, other, x_name="x"):
    """Raises RuntimeError unless ``other``, a tensor, is on x's device."""
    require(other.device == x.device, operator, f"{name} is on another device than {x_name}")


def require_same_options(operator, name, x, other, x_name="x"):
    """Raises RuntimeError unless ``other`` has x's device and, except under autocast (which aligns it), x's dtype."""
    require_same_device(operator, name, x, other, x_name)
    require(
        other.dtype == x.dtype or torch.is_autocast_enabled(x.device.type),
        operator,
        f"{name} has another dtype than {x_name}",
    )


def require_shape(operator, name, tensor, shape):
    """Raises RuntimeError unless ``tensor`` has this ``shape``."""
    given, expected = tuple(tensor.shape), tuple(shape)
    require(given == expected, operator, lambda: f"{name} has shape {given}, expected {expected}")


def require_broadcast(operator, x, other):
    """Raises RuntimeError unless the shapes of x and other broadcast."""
    for one, two in zip(reversed(x.shape), reversed(other.shape)):
        message = f"shapes {tuple(x.shape)} and {tuple(other.shape)} do not broadcast"
        require(one == two or one == 1 or two == 1, operator, message)
