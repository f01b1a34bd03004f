"""The table of aliases of public functions and classes.

Each alias is the same object as its target. A module of aliases lists them in its ``__all__`` and is filled by
:func:`of`.
"""

import importlib
from typing import Any


def _of_ops(names: str) -> dict[str, str]:
    return {name: f"kfconvert.ops.{name}" for name in names.split()}


_FUSED = {
    "fused_add_norm": "kfconvert.ops.add_layer_norm",
    "fused_add_rms_norm": "kfconvert.ops.add_rms_norm",
    "fused_attention_score": "kfconvert.ops.attention_score",
    "fused_bias_gelu": "kfconvert.ops.bias_gelu",
    "fused_gelu_dropout": "kfconvert.ops.gelu_dropout",
    "fused_layer_norm_gelu": "kfconvert.ops.layer_norm_gelu",
    "fused_layer_norm_relu": "kfconvert.ops.layer_norm_relu",
}
# module -> alias -> path of the target
TABLE: dict[str, dict[str, str]] = {
    "kfconvert.ops": {
        **_FUSED,
        "elementwise_add_relu": "kfconvert.ops.add_relu",
        "elementwise_mul_tanh": "kfconvert.ops.mul_tanh",
    },
    "kfconvert.kernels": {
        **_FUSED,
        **_of_ops("SoftMaxOp fused_adam fused_adamw fused_linear_activation fused_multihead_attention fused_sgd"),
        **_of_ops("get_cuda_softmax"),
    },
    "kfconvert.kernels.elementwise": _of_ops(
        "add_mul_exp add_relu add_sigmoid geglu mish_scale mul_tanh multiply_relu prelu_bias swish_multiply"
    ),
    "kfconvert.kernels.fusion": {
        **_of_ops("add_layer_norm add_rms_norm batch_norm_relu bias_dropout_add bias_gelu bias_relu bias_silu"),
        **_of_ops("conv2d_bn_act conv2d_gelu_dropout ffn_block gelu_dropout group_norm_silu layer_norm_gelu"),
        **_of_ops("layer_norm_relu layer_norm_silu rms_norm_gelu"),
        "linear_activation": "kfconvert.ops.fused_linear_activation",
        "multihead_attention": "kfconvert.ops.fused_multihead_attention",
    },
    "kfconvert.kernels.reduction": {
        **_of_ops("cross_entropy mse_loss softmax"),
        "mean_abs": "kfconvert.ops.reduce_mean_abs",
        "sum_squared": "kfconvert.ops.reduce_sum_squared",
    },
    "kfconvert.auto_convert": {
        "ConversionError": "kfconvert.converter.ConversionError",
        "ModelConverter": "kfconvert.converter.ModelConverter",
        "auto_convert_model": "kfconvert.converter.auto_convert_model",
        "validate_optimization": "kfconvert.validator.validate_optimization",
    },
}


def of(module: str) -> dict[str, Any]:
    """Returns the targets of the aliases in ``module``."""
    return {name: found(path) for name, path in TABLE[module].items()}


def found(path: str) -> Any:
    """Returns the object at ``path``, a module and a name in it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
