"""rope: ``y = x * cos + rotated(x) * sin``, the rotary position embedding of Su et al., arXiv:2104.09864.

rotated(x) maps the pairs (a, b) of x to (-b, a) and is not stored. The gradient with respect to x is
grad * cos - rotated(grad * sin), by the same kernel with the inverse rotation.
"""

import torch

from ..declaration import declare, wants_gradients
from ..double_backward import is_differentiated
from ..registration import (
    autocast,
    cast_to_widest,
    define_with_twin,
    differentiate,
    has_kernels,
    records_gradient,
    require,
    require_float,
    require_same_options,
    wants_gradient,
)

__all__ = ["rope"]


def _rotated(x, interleaved):
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def reference(x, cos, sin, interleaved=False):
    """Computes :func:`rope` in plain ATen, differentiable."""
    return x * cos + _rotated(x, interleaved) * sin


@declare(
    group="attention",
    example=lambda t, rows, columns: (t(2, 3, 7, 12), t(7, 12), t(7, 12)),
    why_aten=lambda x, cos, sin, interleaved=False: wants_gradients(cos, sin),
)
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Computes ``x * cos + rotated(x) * sin``, in x's shape and dtype.

    Args:
        x: (..., D), D even, any strides; float64, float32, float16 or bfloat16 (half types are computed
            in float32).
        cos, sin: (..., D), shapes that broadcast to x's; x's dtype and device (autocast aligns the dtypes).
            Column j applies to column j of x, so every angle occurs twice: in both halves, or in both columns of
            a pair if ``interleaved``. If one of them needs a gradient, plain ATen runs.
        interleaved: pairs are neighbors, (x[2i], x[2i + 1]), as in GPT-J; otherwise pairs are half a row
            apart, (x[i], x[i + D/2]), as in Llama and GPT-NeoX.

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
    """
    if not has_kernels(x) or records_gradient(cos, sin):
        check_rope(x, cos, sin)
        return reference(x, cos, sin, interleaved)
    operator = _DIFFERENTIABLE if wants_gradient(x) else rope_inference
    return operator(x, cos, sin, interleaved, False)


def check_rope(x, cos, sin):
    """Raises RuntimeError if shapes, dtypes or devices are incompatible."""
    require_float("rope", x)
    require(
        x.dim() >= 1 and x.shape[-1] % 2 == 0, "rope", f"x has shape {tuple(x.shape)}, expected an even last dimension"
    )
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_same_options("rope", name, x, tensor)
        sizes = zip(reversed(tensor.shape), reversed(x.shape))
        fits = 1 <= tensor.dim() <= x.dim() and all(n in (1, size) for n, size in sizes)
        require(
            fits and tensor.shape[-1] == x.shape[-1],
            "rope",
            f"{name} has shape {tuple(tensor.shape)}, expected {tuple(x.shape)} or what broadcasts to it "
            f"with {x.shape[-1]} columns",
        )


def _compose(x, cos, sin, interleaved, transposed):
    check_rope(x, cos, sin)
    y = x * cos - _rotated(x * sin, interleaved) if transposed else reference(x, cos, sin, interleaved)
    return _fake(x, cos, sin, interleaved, transposed).copy_(y)


def _fake(x, cos, sin, interleaved, transposed):
    check_rope(x, cos, sin)
    together = x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(together)
    return y if y.shape[-1] <= 1 or y.stride(-1) == 1 else x.new_empty(x.shape)


def _save(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, grad):
    cos, sin = ctx.saved_tensors
    operator = _DIFFERENTIABLE if is_differentiated() else rope_inference
    return operator(grad, cos, sin, ctx.interleaved, not ctx.transposed), None, None, None, None


# transposed: x * cos - rotated(x * sin), the gradient
_OPERATOR, rope_inference = define_with_twin(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed) -> Tensor", _compose, _fake
)
_DIFFERENTIABLE = differentiate(_OPERATOR, _differentiate, _save)
autocast((_OPERATOR, rope_inference), cast_to_widest)
