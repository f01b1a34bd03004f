"""Arguments of the operators by name: small tensors of odd shapes."""

import torch

NORM = (33,)


def weighted(t):
    return t(5, 33), NORM, t(33), t(33)


def embedded(t):
    return torch.arange(10, device=t().device).view(2, 5), t(11, 33), t(7, 33), t(2, 33), t(33), t(33)


# Each makes the arguments from a function that makes a float tensor of a shape.
ARGUMENTS = {
    "act_mul": lambda t: (t(5, 33), t(33), "silu"),
    "add_layer_norm": lambda t: (t(5, 33), t(5, 33), NORM, t(33), t(33)),
    "add_mul_exp": lambda t: (t(5, 33), t(33)),
    "add_relu": lambda t: (t(5, 33), t(5, 33)),
    "add_rms_norm": lambda t: (t(5, 33), t(33), NORM, t(33)),
    "add_sigmoid": lambda t: (t(5, 33), t(5, 1)),
    "batch_norm_relu": lambda t: (t(5, 33), t(33), t(33), t(33), t(33).square()),
    "bias_act": lambda t: (t(5, 33), t(33), t(5, 33), "gelu"),
    "bias_dropout_add": lambda t: (t(5, 33), t(33), t(5, 33)),
    "bias_gelu": lambda t: (t(5, 33), t(33)),
    "bias_relu": lambda t: (t(5, 33, 3), t(33), 1),
    "bias_silu": lambda t: (t(5, 33), t(5), 0),
    "conv_act": lambda t: (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4)),
    "cross_entropy": lambda t: (t(5, 33), torch.arange(5, device=t().device)),
    "dequantize_int8": lambda t: (t(5, 33).to(torch.int8), 0.5, 3),
    "embedding_layer_norm": embedded,
    "geglu": lambda t: (t(5, 33), t(5, 33)),
    "gelu_dropout": lambda t: (t(5, 33),),
    "batch_norm_act": lambda t: (t(2, 6, 5), t(6), t(6).abs(), t(6), t(6), 1e-5, "relu"),
    "group_norm_act": lambda t: (t(2, 6, 5), 3, t(6), t(6), 1e-5, "relu"),
    "group_norm_silu": lambda t: (t(2, 6, 5), 3, t(6), t(6)),
    "layer_norm_act": weighted,
    "layer_norm_gelu": weighted,
    "layer_norm_relu": weighted,
    "layer_norm_silu": weighted,
    "linear_act": lambda t: (t(5, 33), t(7, 33), t(7), "gelu"),
    "mish_scale": lambda t: (t(5, 33), t(33)),
    "mse_loss": lambda t: (t(5, 33), t(5, 33)),
    "mul_tanh": lambda t: (t(5, 33), t(33)),
    "multiply_relu": lambda t: (t(5, 33), t(33)),
    "normalize_image": lambda t: (t(2, 5, 6, 3).to(torch.uint8), (0.5,) * 3, (0.2,) * 3),
    "prelu_bias": lambda t: (t(5, 33), t(33), t(33)),
    "quantize_int8": lambda t: (t(5, 33), 0.03, 2),
    "reduce_mean_abs": lambda t: (t(5, 33), -1),
    "reduce_sum_squared": lambda t: (t(5, 33), -1),
    "rms_norm": lambda t: (t(5, 33), NORM, t(33)),
    "rms_norm_act": lambda t: (t(5, 33), NORM, t(33), 1e-6, "silu"),
    "rms_norm_gelu": lambda t: (t(5, 33), NORM, t(33)),
    "rope": lambda t: (t(2, 3, 7, 12), t(7, 12), t(7, 12)),
    "scale_shift_act": lambda t: (t(2, 6, 5), t(6), t(6), "relu"),
    "softmax": lambda t: (t(5, 33), -1, 0.5, t(33)),
    "swish_multiply": lambda t: (t(5, 33), t(5, 33)),
}


def arguments(name, device, dtype=torch.float32):
    return ARGUMENTS[name](lambda *shape: torch.randn(shape, device=device).to(dtype))
