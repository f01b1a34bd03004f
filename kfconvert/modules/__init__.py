"""Fused modules, which share parameters with the original modules or tensors. See each class."""

from ..runtime import Derived
from .attention import FusedAttention, MaskTerm
from .base import CHANNELS_LAST as CHANNELS_LAST
from .base import FLOAT_DTYPES as FLOAT_DTYPES
from .base import FusedModule
from .batch_norm import FusedBatchNormAct
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
from .decode_attention import FusedDecodeAttention
from .gated import FusedGatedLinear
from .group_norm import FusedGroupNorm
from .joining import joined as joined
from .linear import FusedLinear, FusedLinearGELU, FusedLinearReLU, FusedLinearSigmoid, FusedLinearSiLU, FusedLinearTanh
from .linear_scale import FusedLinearScale
from .merged import FusedMergedLinear
from .norm import FusedAddLayerNorm, FusedLayerNorm, FusedLayerNormGELU, FusedLayerNormReLU, FusedLayerNormSiLU
from .norm_linear import FusedNormLinear
from .own import Arguments as Arguments
from .own import Input as Input
from .own import OwnFusion as OwnFusion
from .quantized_linear import FusedQuantizedLinear
from .quantized_products import FusedGatedQuantizedLinear, FusedMergedQuantizedLinear
from .rms_norm import FusedAddRMSNorm, FusedRMSNorm
from .rotary import FusedRotary
from .self_attention import FusedSelfAttention
from .squeeze_excite import FusedSqueezeExcite
from .transformer import FusedTransformerLayer

__all__ = [
    "Derived",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedAttention",
    "FusedBatchNormAct",
    "FusedConv1dBNReLU",
    "FusedConv2dBN",
    "FusedConv2dBNHardswish",
    "FusedConv2dBNReLU",
    "FusedConv2dBNReLU6",
    "FusedConv2dBNSiLU",
    "FusedConv3dBNReLU",
    "FusedConvBN",
    "FusedDecodeAttention",
    "FusedGatedLinear",
    "FusedGatedQuantizedLinear",
    "FusedGroupNorm",
    "FusedLayerNorm",
    "FusedLayerNormGELU",
    "FusedLayerNormReLU",
    "FusedLayerNormSiLU",
    "FusedLinear",
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearScale",
    "FusedLinearSiLU",
    "FusedLinearSigmoid",
    "FusedLinearTanh",
    "FusedMergedLinear",
    "FusedMergedQuantizedLinear",
    "FusedNormLinear",
    "FusedModule",
    "FusedQuantizedLinear",
    "FusedRMSNorm",
    "FusedRotary",
    "FusedSelfAttention",
    "FusedSqueezeExcite",
    "FusedTransformerLayer",
    "MaskTerm",
]
