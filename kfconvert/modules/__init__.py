"""Fused modules: built from the original modules or tensors, sharing their parameters; see each class."""

from .base import FusedModule
from .conv import (
    FusedConv1dBNReLU,
    FusedConv2dBN,
    FusedConv2dBNHardswish,
    FusedConv2dBNReLU,
    FusedConv2dBNReLU6,
    FusedConv2dBNSiLU,
    FusedConv3dBNReLU,
    FusedConvBN,
)
from .derived import Derived
from .gated import FusedGatedLinear
from .linear import (
    FusedLinear,
    FusedLinearGELU,
    FusedLinearReLU,
    FusedLinearSigmoid,
    FusedLinearSiLU,
    FusedLinearTanh,
)
from .merged import FusedMergedLinear
from .norm import (
    FusedAddLayerNorm,
    FusedLayerNorm,
    FusedLayerNormGELU,
    FusedLayerNormReLU,
    FusedLayerNormSiLU,
)
from .rms_norm import FusedAddRMSNorm, FusedRMSNorm

__all__ = [
    "Derived",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedConv1dBNReLU",
    "FusedConv2dBN",
    "FusedConv2dBNHardswish",
    "FusedConv2dBNReLU",
    "FusedConv2dBNReLU6",
    "FusedConv2dBNSiLU",
    "FusedConv3dBNReLU",
    "FusedConvBN",
    "FusedGatedLinear",
    "FusedLayerNorm",
    "FusedLayerNormGELU",
    "FusedLayerNormReLU",
    "FusedLayerNormSiLU",
    "FusedLinear",
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearSiLU",
    "FusedLinearSigmoid",
    "FusedLinearTanh",
    "FusedMergedLinear",
    "FusedModule",
    "FusedRMSNorm",
]
