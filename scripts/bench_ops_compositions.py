"""More cases of bench_ops.py: calls of libraries in a row, each at one representative size, and what has no case."""

from typing import Any

import torch
import torch.nn.functional as F
from bench_ops_cases import CASES, Case, Function, Maker, image
from torch import Tensor

from kfconvert.kernels import reference
from kfconvert.ops.declaration import OPERATORS, Operator, wants_gradients

WORDS, POSITIONS = 30522, 512


def heads(make: Maker, rows: int, columns: int) -> Tensor:
    """rows tokens, 512 a sequence, 64 columns a head, in the layout in which a projection leaves them."""
    sequence, width = min(rows, 512), min(columns, 64)
    return make.normal(rows // sequence, sequence, columns // width, width).transpose(1, 2)


def rotations(make: Maker, sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of Llama."""
    frequencies = 10000 ** (-torch.arange(0, width, 2, device=make.device) / width)
    angles = torch.outer(torch.arange(sequence, device=make.device), frequencies).repeat(1, 2)
    return angles.cos().to(make.dtype), angles.sin().to(make.dtype)


def rope_inputs(make: Maker, rows: int, columns: int, tensors: int) -> tuple[Tensor, ...]:
    x = [heads(make, rows, columns) for _ in range(tensors)]
    return *x, *rotations(make, *x[0].shape[-2:])


def feed_forward(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    inner = 4 * columns
    w1, w2 = make.normal(inner, columns) / columns**0.5, make.normal(columns, inner) / inner**0.5
    return make.normal(rows, columns), w1, make.normal(inner), w2, make.normal(columns)


def embeddings(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    sequence = min(rows, POSITIONS)
    ids = make.integers(0, WORDS, rows // sequence, sequence)
    tables = (make.normal(size, columns) for size in (WORDS, POSITIONS, 2))
    return ids, *tables, make.uniform(columns), make.normal(columns)


def plain_embedding_layer_norm(ids, word, position, token_type, weight, bias):
    types = F.embedding(torch.zeros_like(ids), token_type)
    total = F.embedding(ids, word) + types + position[: ids.shape[-1]]
    return F.layer_norm(total, word.shape[1:], weight, bias, 1e-12)


def convolution(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    x = image(make, rows, columns)
    channels = x.shape[1]
    weight = make.normal(channels, channels, 3, 3) / (9 * channels) ** 0.5
    statistics = make.normal(channels), make.uniform(channels)
    return x, weight, *statistics, make.uniform(channels), make.normal(channels)


def conv2d_bn_relu(library: Any) -> Function:
    return lambda x, w, *norm: library.conv2d_bn_act(x, w, None, *norm, "relu", padding=1)


# The definitions of attention write all scores on purpose; people call F.scaled_dot_product_attention.
COMPOSITIONS = (
    Case(
        "fused_linear_activation",
        "composition",
        lambda make, rows, columns: feed_forward(make, rows, columns)[:3],
        lambda ops: lambda x, w, b: ops.fused_linear_activation(x, w, b, "gelu"),
        gradients=(0, 1, 2),
    ),
    Case("ffn_block", "composition", feed_forward, gradients=(0, 1, 2, 3, 4)),
    Case(
        "flash_attention",
        "composition",
        lambda make, rows, columns: tuple(heads(make, rows, columns) for _ in range(3)),
        eager=F.scaled_dot_product_attention,
        gradients=(0, 1, 2),
    ),
    Case(
        "rope",
        "composition",
        lambda make, rows, columns: rope_inputs(make, rows, columns, 2),
        lambda ops: lambda q, k, cos, sin: (ops.rope(q, cos, sin), ops.rope(k, cos, sin)),
        gradients=(0, 1),
        reads=(2, 3),
        liger=lambda liger: liger.LigerRopeFunction.apply,
        note="rope: of queries and keys; Liger-Kernel's writes into them",
    ),
    Case(
        "rope_attention",
        "composition",
        lambda make, rows, columns: rope_inputs(make, rows, columns, 3),
        eager=lambda q, k, v, cos, sin: F.scaled_dot_product_attention(
            reference.rope(q, cos, sin), reference.rope(k, cos, sin), v
        ),
        gradients=(0, 1, 2),
    ),
    Case(
        "embedding_layer_norm",
        "composition",
        embeddings,
        eager=plain_embedding_layer_norm,
        gradients=(1, 2, 3, 4, 5),
    ),
    Case("conv2d_bn_act", "composition", convolution, conv2d_bn_relu, gradients=(0, 1, 4, 5)),
)


def of_declaration(name: str, operator: Operator) -> Case:
    """The case of an operator by its example: what it takes beside tensors stays as it is there, and all tensors of
    floats want a gradient."""

    def inputs(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
        return tuple(value for value in operator.example(make.normal, rows, columns) if isinstance(value, Tensor))

    example = operator.example(Maker(torch.device("cpu"), torch.float32).normal, 5, 33)

    def call(library: Any) -> Function:
        def of_tensors(*tensors: Tensor) -> Any:
            left = iter(tensors)
            return getattr(library, name)(*(next(left) if isinstance(value, Tensor) else value for value in example))

        return of_tensors

    tensors = [value for value in example if isinstance(value, Tensor)]
    floats = tuple(index for index, tensor in enumerate(tensors) if tensor.is_floating_point())
    return Case(name, operator.group, inputs, call, gradients=() if operator.why_aten is wants_gradients else floats)


_named = {case.operator for case in (*CASES, *COMPOSITIONS)}
DECLARED = tuple(
    of_declaration(name, operator)
    for name, operator in OPERATORS.items()
    if operator.is_compiled and operator.timed_as is None and name not in _named
)
