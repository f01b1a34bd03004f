"""The operators that a stored graph may call. They only compute values: none writes to its arguments, draws random
numbers, returns uninitialized memory, reads files or runs code."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..inputs import Unstorable

_ATEN = frozenset(
    """
    abs acos acosh add addcdiv addcmul addmm alias all amax amin any arange argmax argmin argsort as_strided asin asinh
    atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d baddbmm batch_norm bilinear bitwise_and bitwise_not bitwise_or bitwise_xor
    bmm broadcast_to cat ceil celu channel_shuffle chunk clamp clamp_max clamp_min clone concat constant_pad_nd
    contiguous copy conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution cos cosh cumprod
    cumsum deg2rad detach diag diagonal diff div dot einsum elu embedding embedding_bag eq erf erfc exp exp2 expand
    expand_as expm1 eye fft_fft fft_fft2 fft_ifft fft_ifft2 fft_irfft fft_irfft2 fft_rfft fft_rfft2 flatten flip floor
    floor_divide fmod frac frobenius_norm full full_like gather ge gelu glu grid_sampler group_norm gt hardshrink
    hardsigmoid hardswish hardtanh histc hstack im2col index index_add index_copy index_fill index_put index_select
    instance_norm isfinite isinf isnan isneginf isposinf layer_norm le leaky_relu lerp lift_fresh_copy linalg_norm
    linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid log_softmax logaddexp logical_and logical_not
    logical_or logical_xor logsumexp lt masked_fill masked_scatter matmul max max_pool1d max_pool2d
    max_pool2d_with_indices max_pool3d maximum mean min minimum mish mm movedim moveaxis mul mv nan_to_num narrow
    native_batch_norm native_group_norm native_layer_norm ne neg new_full new_ones new_zeros norm one_hot ones ones_like
    outer pad permute pixel_shuffle pixel_unshuffle polar pow prelu prod ravel reciprocal reflection_pad1d
    reflection_pad2d relu relu6 remainder repeat repeat_interleave replication_pad1d replication_pad2d reshape
    reshape_as rms_norm roll rot90 round rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    select select_scatter selu sigmoid sign silu sin sinh slice slice_scatter softmax softplus softshrink sort split
    split_with_sizes sqrt square squeeze stack std sub sum swapaxes swapdims sym_size t take take_along_dim tan tanh
    tensor_split threshold tile to topk transpose tril triu trunc type_as unbind unflatten unfold unsqueeze
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    var var_mean vdot view view_as view_as_complex view_as_real vstack where xlogy zeros zeros_like __and__ __or__
    __xor__ _assert_tensor_metadata _grouped_mm _int_mm _log_softmax _scaled_mm _softmax _to_copy _unsafe_view
    _weight_norm
    """.split()
)
_BY_LIBRARY = {
    "aten": _ATEN,
    # Of activations that are quantized, and of weights with small integers.
    "torchao": frozenset(("choose_qparams_affine", "dequantize_affine", "quantize_affine")),
    # Of experts, where torch has no grouped product.
    "transformers": frozenset(("grouped_mm_fallback",)),
}
# Python functions of sizes, and getitem for results of operators.
_NAMES: dict[Any, str] = {
    **{getattr(operator, name): name for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "neg")},
    **{getattr(torch, name): name for name in ("sym_max", "sym_min")},
}
_OF_PYTHON = {name: function for function, name in _NAMES.items()}


def operator_name(target: Any) -> str:
    """Returns the name of an operator in a stored graph. Raises Unstorable."""
    name = _NAMES.get(target) if not isinstance(target, torch._ops.OpOverload) else str(target)
    if name is None or operator_named(name) is not target:
        raise Unstorable(f"it calls {str(target)[:100]}")
    return name


def operator_named(name: str) -> Any:
    """Returns the operator ``name``, such as ``aten.linear.default``. Raises Unstorable."""
    if name in _OF_PYTHON:
        return _OF_PYTHON[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    # The operators of libraries exist once these are loaded. A lookup loads no library.
    found: Any = None
    if namespace == "kfconvert" or packet in _BY_LIBRARY.get(namespace, ()):
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload) or not _only_computes(found):
        raise Unstorable(f"{name[:100]!r} is not an operator that a stored graph may call")
    return found


def _only_computes(target: torch._ops.OpOverload) -> bool:
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return not target._schema.is_mutable and (
        not draws or target is torch.ops.aten.scaled_dot_product_attention.default
    )
