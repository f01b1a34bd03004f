"""Root mean square normalization with an activation, and with the residual addition before it."""

import torch
from torch import nn

from ..ops.fused.rms_norm_act import reference, rms_norm_act
from .base import held
from .norm_base import AddsResidual, FusedNorm


class FusedRMSNorm(FusedNorm):
    """``y = act(x / sqrt(mean(x^2) + eps) * (offset + weight))``, the norm of T5, Llama and Gemma.

    The mean is over the last ``len(normalized_shape)`` dimensions. x: (..., *normalized_shape), any strides;
    weight: normalized_shape or None (then without ``offset`` too), in x's dtype, or float32 for a half type; y
    as x. float64, float32, float16, bfloat16; half types are computed in float32 and rounded once, at the end.
    ``offset``: 1 in Gemma, whose weights start at 0. Raises ValueError for an unknown activation.
    Strategies: "kernel" (``kfconvert.ops.rms_norm_act``), "composition".
    """

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        activation: str | None = None,
        offset: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__(normalized_shape, eps, activation)
        self._set_options(offset=offset)
        weight = torch.full(self.normalized_shape, 1.0 - offset, device=device, dtype=dtype)
        self._set_tensors(weight=nn.Parameter(weight) if elementwise_affine else None)

    @classmethod
    def from_tensors(
        cls, normalized_shape, weight: torch.Tensor | None, eps: float = 1e-6, activation: str | None = None, **options
    ) -> "FusedRMSNorm":
        """Creates a module that shares ``weight`` (normalized_shape, or None).

        A parameter stays a parameter, and a plain tensor becomes a buffer. Raises TypeError for a tensor that is not
        plain floats, ValueError for a shape that does not match. ``options``: ``offset``, and ``return_sum`` if the
        class has it.
        """
        return cls._of_tensors(normalized_shape, eps, activation, options, weight=weight)

    def _set_options(self, offset: float = 0.0) -> None:
        self.offset = offset

    def _kernel(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        weight, shape = held(self, "weight"), self.normalized_shape
        return rms_norm_act(x, shape, weight, self.eps, self.activation, residual, self.return_sum, self.offset)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return reference(x, self.normalized_shape, self.weight, self.eps, self.activation, offset=self.offset)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, offset={self.offset}"


class FusedAddRMSNorm(AddsResidual, FusedRMSNorm):  # type: ignore[misc]  # its methods take another argument
    """``s = x + residual; y = act(rms_norm(s))``.

    x: (..., *normalized_shape); residual: x's dtype, and x's shape or a shape that repeats over it. Returns y, or
    (y, s) with ``return_sum``; s, in the dtype of x, is the residual stream of a pre-norm transformer. See
    :class:`FusedRMSNorm`.
    """
