"""rope: ``y = x * cos + rotated(x) * sin``, the rotary position embedding of Su et al., arXiv:2104.09864.

rotated(x) turns the pairs (a, b) of x into (-b, a). Without a gradient it is never written: its two parts are
multiplied and added in place.
"""

import torch

from .registration import require, require_float, require_same_options


def reference(x, cos, sin, interleaved=False):
    """The definition of :func:`rope` in plain ATen, differentiable."""
    if interleaved:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated * sin


def by_parts(x, cos, sin, interleaved=False):
    """:func:`reference` of tensors of one dtype, without the rotated x; for inference."""
    half = x.shape[-1] // 2
    a, b = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    y = x * cos
    y[..., a].addcmul_(x[..., b], sin[..., a], value=-1)
    y[..., b].addcmul_(x[..., a], sin[..., b])
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """``x * cos + rotated(x) * sin``, in x's shape and dtype; in plain ATen on every device.

    Args:
        x: (..., D), D even, any strides; float64, float32, float16 or bfloat16.
        cos, sin: (..., D), shapes that broadcast to x's; x's dtype and device (autocast aligns the dtypes).
            Column j belongs to column j of x, so that every angle is there twice: in both halves, or, where
            ``interleaved``, in both columns of a pair.
        interleaved: pairs are neighbours, (x[2i], x[2i + 1]), as in GPT-J; otherwise they lie half a row
            apart, (x[i], x[i + D/2]), as in Llama and GPT-NeoX.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit.
    """
    _check(x, cos, sin)
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad)
    one_dtype = x.dtype == cos.dtype == sin.dtype
    return (by_parts if one_dtype and not wants_gradient else reference)(x, cos, sin, interleaved)


def _check(x, cos, sin):
    require_float("rope", x)
    require(
        x.dim() >= 1 and x.shape[-1] % 2 == 0,
        "rope",
        f"x has shape {tuple(x.shape)}, expected an even last dimension",
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
