"""Decides which fused modules run in one launch."""

from .base import FusedModule
from .decode_attention import FusedDecodeAttention, are_norms_of_heads
from .norm_linear import FusedNormLinear, fits


def joined(reader: FusedModule, *norms: FusedModule) -> FusedModule | None:
    """Returns a module that computes ``norms`` and the module that reads their results in one launch, or None if there
    is none: a product and its norm, or attention and the norms of q and k. All modules have their strategies."""
    if any(norm.strategy != "kernel" for norm in norms):
        return None
    if reader.strategy == "skinny" and len(norms) == 1 and fits(norms[0], reader):
        return FusedNormLinear(norms[0], reader)
    if not isinstance(reader, FusedDecodeAttention) or reader.strategy != "kernel" or not are_norms_of_heads(*norms):
        return None
    module = FusedDecodeAttention(reader.scale, reader.masked, reader.rotated, reader.in_place, norms)
    module.strategy = reader.strategy
    return module
