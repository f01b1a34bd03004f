"""Layer normalization with an activation, and with the residual addition before it."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.activations import apply_activation
from ..ops.fused.layer_norm_act import layer_norm_act
from .base import gelu_name, held
from .norm_base import AddsResidual, FusedNorm


class FusedLayerNorm(FusedNorm):
    """``y = act(layer_norm(x))``, an ``nn.LayerNorm`` and the activation after it.

    layer_norm(x) = (x - mean) / sqrt(var + eps) * weight + bias, mean and (biased) variance over the last
    ``len(normalized_shape)`` dimensions. x: (..., *normalized_shape), any strides; weight, bias:
    normalized_shape or None; y as x. float64, float32, float16, bfloat16. Raises ValueError for an unknown
    activation.
    Strategies: "kernel" (``kfconvert.ops.layer_norm_act``), "composition".
    """

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        activation: str | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(normalized_shape, eps, activation)
        options = {"device": device, "dtype": dtype}
        self._set_tensors(
            weight=nn.Parameter(torch.ones(self.normalized_shape, **options)) if elementwise_affine else None,
            bias=nn.Parameter(torch.zeros(self.normalized_shape, **options)) if elementwise_affine and bias else None,
        )

    @classmethod
    def from_tensors(
        cls,
        normalized_shape,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float = 1e-5,
        activation: str | None = None,
        **options,
    ) -> "FusedLayerNorm":
        """Creates a module that shares ``weight`` and ``bias`` (normalized_shape, or None).

        Parameters stay parameters, and plain tensors become buffers. Raises TypeError for tensors that are not plain
        floats, ValueError for shapes that do not match. ``options``: ``return_sum`` if the class has it.
        """
        return cls._of_tensors(normalized_shape, eps, activation, options, weight=weight, bias=bias)

    def _kernel(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        weight, bias = held(self, "weight"), held(self, "bias")
        shape = self.normalized_shape
        return layer_norm_act(x, shape, weight, bias, self.eps, self.activation, residual, self.return_sum)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return apply_activation(y, self.activation)


class FusedAddLayerNorm(AddsResidual, FusedLayerNorm):  # type: ignore[misc]  # its methods take another argument
    """``s = x + residual; y = act(layer_norm(s))``.

    x: (..., *normalized_shape); residual: x's dtype, and x's shape or a shape that repeats over it. Returns y, or
    (y, s) with ``return_sum``; s, in the dtype of x, is the residual stream of a pre-norm transformer. See
    :class:`FusedLayerNorm`.
    """


class FusedLayerNormReLU(FusedLayerNorm, default_activation="relu"):
    """``relu(layer_norm(x))``; see :class:`FusedLayerNorm`."""


class FusedLayerNormGELU(FusedLayerNorm, default_activation="gelu"):
    """``gelu(layer_norm(x))``, ``approximate`` "none" (erf) or "tanh"; see :class:`FusedLayerNorm`."""

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        approximate: str = "none",
        device=None,
        dtype=None,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, gelu_name(approximate), device, dtype)


class FusedLayerNormSiLU(FusedLayerNorm, default_activation="silu"):
    """``silu(layer_norm(x))``; see :class:`FusedLayerNorm`."""
