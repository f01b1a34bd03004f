"""The names of the lessons and of the sizes of their inputs."""

NAMES = ("add_mul_exp", "layer_norm", "linear_gelu", "attention", "transformer_block")
SIZES = ("small", "full")
