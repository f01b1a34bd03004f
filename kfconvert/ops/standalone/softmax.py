"""softmax of scaled and masked scores, in one pass over memory for the forward and one for the backward.

Backward: with g = grad * y, scale * (g - y * sum(g)) is the gradient of x, 0 where a boolean mask is False. Without
scale, it is the gradient of an additive mask, summed over its broadcast dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import checked
from ..declaration import declare
from ..double_backward import is_differentiated
from ..registration import (
    autocast,
    cast_as_norms,
    define,
    define_with_twin,
    differentiate,
    has_kernels,
    require,
    require_float,
    require_same_device,
    require_same_options,
    wants_gradient,
)

__all__ = ["SoftMaxOp", "get_cuda_softmax", "softmax"]


def _normalises_outer(x, dim=-1, scale=1.0, mask=None):
    return "the kernel takes the last dimension" if x.dim() == 0 or dim not in (-1, x.dim() - 1) else None


def _plain(x, dim, scale, mask):
    v = x if scale == 1 else x * scale
    if mask is not None:
        v = v.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else v + mask
    return torch.softmax(v, dim)


@declare(
    group="reduction",
    example=lambda t, rows, columns: (t(rows, columns), -1, 0.5, t(columns)),
    why_aten=_normalises_outer,
)
def softmax(x: Tensor, dim: int = -1, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Computes ``softmax(x * scale + mask)`` along ``dim``, contiguous if it is the last dimension.

    Args:
        x: any shape and strides; float64, float32, float16 or bfloat16 (half types are computed in
            float32).
        mask: a shape that broadcasts to x's. Boolean, True for visible elements, as in
            ``torch.nn.functional.scaled_dot_product_attention``; or x's dtype, to be added. A row without visible
            elements is NaN.

    ATen's operators run for other dimensions than the last and for 0-d x, and on the CPU for the backward without
    scale and boolean mask.

    Raises:
        IndexError: dim out of range. RuntimeError: incompatible shapes, dtypes or devices.
    """
    compiled = has_kernels(x)
    dims = max(x.dim(), 1)
    if not -dims <= dim < dims:
        raise IndexError(f"kfconvert::softmax: dim {dim} is out of range for x of shape {tuple(x.shape)}")
    last = x.dim() > 0 and dim in (-1, x.dim() - 1)
    if not compiled or not last:
        check_mask(x, mask)
        return _plain(x, dim, scale, mask)
    operator = _DIFFERENTIABLE if wants_gradient(x, mask) else _INFERENCE
    return operator(x, mask, scale)


class SoftMaxOp:
    """:func:`softmax` with the interface of an autograd function, ``SoftMaxOp.apply(x, dim)``, and its two halves.

    Args:
        module: an object with ``forward(x)`` and ``backward(grad, output)`` over the last dimension, such as the
            module compiled from ``softmax_cuda.cu``; None uses this package.
    """

    apply = staticmethod(checked(softmax))

    def __init__(self, module: object = None):
        self._forward: Callable[..., Tensor] = softmax
        self._backward: Callable[..., Tensor] = _last_dim_backward
        if module is not None:
            self._forward, self._backward = _halves(module)

    def __call__(self, *args, **kwargs) -> Tensor:
        """Computes :func:`softmax` with all of its arguments, differentiable."""
        return self.apply(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the softmax over the last dimension of x."""
        return self._forward(x)

    def backward(self, grad: Tensor, output: Tensor) -> Tensor:
        """Computes the gradient of x, ``output * (grad - sum(grad * output))``.

        grad: gradient of output, the result of :meth:`forward`; equal shape, dtype and device, else RuntimeError.
        """
        return self._backward(grad, output)


def _halves(module):
    if not all(callable(getattr(module, name, None)) for name in ("forward", "backward")):
        raise TypeError(f"kfconvert::softmax: module must have forward and backward, got {type(module).__name__}")
    return module.forward, module.backward


def _last_dim_backward(grad, output):
    operator = "softmax_backward"
    require_float(operator, output)
    require_same_options(operator, "grad", output, grad, "output")
    fits = output.dim() > 0 and grad.shape == output.shape
    require(
        fits,
        operator,
        f"grad of shape {tuple(grad.shape)} and output of shape {tuple(output.shape)} have different shapes",
    )
    return _compose_backward(grad, output, None, 1.0) if output.is_cpu else _BACKWARD(grad, output, None, 1.0)


@declare(group="reduction", timed_as="softmax")
def get_cuda_softmax() -> SoftMaxOp:
    """Returns :class:`SoftMaxOp`, for code that needs the CUDA kernels. Raises RuntimeError without their library."""
    from ... import extension

    require(extension.CUDA_KERNELS_LOADED, "softmax", f"no CUDA kernels: {extension.load_errors.get('cuda')}")
    return SoftMaxOp()


def check_mask(x, mask):
    """Raises RuntimeError unless the kernels accept x and the mask."""
    operator = "softmax"
    require_float(operator, x)
    if mask is None:
        return
    require_same_device(operator, "mask", x, mask)
    fits = mask.dtype in (torch.bool, x.dtype) or torch.is_autocast_enabled(x.device.type)
    require(fits, operator, "mask must be boolean or have the dtype of x")
    sizes = zip(reversed(mask.shape), reversed(x.shape))
    fits = mask.dim() <= x.dim() and all(own == 1 or own == of_x for own, of_x in sizes)
    require(fits, operator, f"mask of shape {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}")


def _compose(x, mask, scale):
    check_mask(x, mask)
    return _plain(x, -1, scale, mask).contiguous()


def _compose_backward(grad, y, mask, scale):
    of_x = torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)
    of_x = of_x if scale == 1 else of_x * scale
    return (of_x if mask is None else of_x.masked_fill(~mask, 0)).contiguous()  # also where y is NaN


def _save(ctx, inputs, output):
    _, mask, ctx.scale = inputs
    ctx.mask_shape = None if mask is None else mask.shape
    ctx.save_for_backward(output, mask if mask is not None and mask.dtype == torch.bool else None)


def _differentiate(ctx, grad):
    y, takes_part = ctx.saved_tensors
    x_needs, mask_needs, _ = ctx.needs_input_grad
    plain = takes_part is None and ctx.scale == 1
    # On the CPU, ATen's kernel is 5 to 25 % faster than ours, as in _last_dim_backward.
    backward = _compose_backward if is_differentiated() or (plain and y.is_cpu) else _BACKWARD
    of_x = backward(grad, y, takes_part, ctx.scale) if x_needs else None
    of_mask = backward(grad, y, None, 1.0).sum_to_size(ctx.mask_shape) if mask_needs else None
    return of_x, of_mask, None


_OPERATOR, _INFERENCE = define_with_twin("softmax(Tensor x, Tensor? mask, float scale) -> Tensor", _compose)
_BACKWARD = define("softmax_backward(Tensor grad, Tensor y, Tensor? mask, float scale) -> Tensor", _compose_backward)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, _INFERENCE), cast_as_norms)
