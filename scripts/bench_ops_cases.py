"""Cases of bench_ops.py: operators with inputs, what they replace, and Liger-Kernel's where it has one."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kfconvert.kernels import reference

Function = Callable[..., Any]

# (rows, columns) by group. Four sets of inputs of 0.5 M elements fit into the L2 cache of a large GPU.
SIZES = {
    "elementwise": tuple((rows, 1024) for rows in (512, 1024, 5120, 51200)),
    "norm": ((1024, 768), (1024, 4096), (16384, 768), (16384, 4096)),
    "reduction": ((1024, 768), (1024, 4096), (16384, 768), (16384, 4096)),
    "composition": ((4096, 768),),
}
VOCABULARY = (4096, 32000)

P = 0.1
EPS = 1e-6
SCALE = 0.125


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes tensors on the device and, unless they are integers, in the dtype of the run."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """From 0.5 to 1.5."""
        return (torch.rand(shape, device=self.device) + 0.5).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, called in one way.

    name: that of the operator; a comma and what is special about the case may follow.
    inputs: makes the arguments from (make, rows, columns).
    call: gives the function from a library that has kfconvert.ops's names; by default the one of that name.
    eager: what it replaces; by default the definition in kfconvert.kernels.reference.
    gradients: numbers of the arguments that get a gradient; without any there is no backward pass.
    reads: numbers of the arguments that the backward cannot do without; one stands for an output of its size
        where that will do. By default all.
    exact: give the exact results from float64 arguments; of several the nearest counts, element by element,
        for what is random. By default `eager`.
    liger: gives the function from the module liger_kernel.ops.
    joint: forward and backward in a row are timed, too, because a forward may compute the gradient.
    """

    name: str
    group: str
    inputs: Callable[[Maker, int, int], tuple[Tensor, ...]]
    call: Callable[[Any], Function] | None = None
    eager: Function | None = None
    gradients: tuple[int, ...] = ()
    reads: tuple[int, ...] | None = None
    exact: tuple[Function, ...] = ()
    liger: Callable[[Any], Function] | None = None
    joint: bool = False
    note: str = ""
    more_sizes: tuple[tuple[int, int], ...] = ()

    @property
    def operator(self) -> str:
        return self.name.partition(",")[0]

    def of(self, library: Any) -> Function:
        return self.call(library) if self.call else getattr(library, self.operator)

    @property
    def plain(self) -> Function:
        return self.eager or self.of(reference)


def pair(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return make.normal(rows, columns) / 2, make.normal(rows, columns) / 2  # of more, exp overflows in float16


def with_row(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return make.normal(rows, columns), make.normal(columns)


def with_weight(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return make.normal(rows, columns), make.uniform(columns)


def with_weight_and_bias(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return make.normal(rows, columns), make.uniform(columns), make.normal(columns)


def residual(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return make.normal(rows, columns), make.normal(rows, columns), make.uniform(columns), make.normal(columns)


def image(make: Maker, rows: int, columns: int) -> Tensor:
    """As many values, in images of 16 x 16."""
    return make.normal(max(1, rows // 64), max(1, columns // 4), 16, 16)


def one(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    return (make.normal(rows, columns),)


def biased(name: str, reads: tuple[int, ...] | None = None) -> Case:
    return Case(name, "elementwise", with_row, gradients=(0, 1), reads=reads)


def paired(name: str, reads: tuple[int, ...] | None = None, **options: Any) -> Case:
    return Case(name, "elementwise", pair, gradients=(0, 1), reads=reads, **options)


def quantizations(kind: str, parameters: Callable[[Maker, int], tuple[Tensor, Tensor]]) -> tuple[Case, Case]:
    def floats(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
        return make.normal(rows, columns), *parameters(make, columns)

    def integers(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
        # The last argument is empty: it tells the dtype of the result, float64 where that is to be exact.
        q = make.integers(-128, 128, rows, columns, dtype=torch.int8)
        return q, *parameters(make, columns), make.normal(0)

    def dequantize(library: Any) -> Function:
        return lambda q, scale, zero, like: library.dequantize_int8(q, scale, zero, dtype=like.dtype)

    return (
        Case(f"quantize_int8, {kind}", "elementwise", floats),
        Case(f"dequantize_int8, {kind}", "elementwise", integers, dequantize),
    )


def scale_and_zero_point(make: Maker, channels: int) -> tuple[Tensor, Tensor]:
    scale = make.uniform(channels, dtype=torch.float32) / 32
    return scale, make.integers(-8, 9, channels, dtype=torch.int32)


def image_of_bytes(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    """As many bytes, but for the rest of a division by 3; the last argument tells the dtype of the result."""
    return make.integers(0, 256, rows, max(1, columns // 3), 3, dtype=torch.uint8), make.normal(0)


def normalization(kind: str, memory_format: torch.memory_format) -> Case:
    def normalize(library: Any) -> Function:
        return lambda image, like: library.normalize_image(
            image, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), dtype=like.dtype, memory_format=memory_format
        )

    return Case(f"normalize_image, {kind}", "elementwise", image_of_bytes, normalize)


ELEMENTWISE = (
    paired("add_relu", (0,)),
    paired("multiply_relu"),
    paired("add_sigmoid", (0,)),
    paired("mul_tanh"),
    paired("add_mul_exp", (0,)),
    paired("swish_multiply", liger=lambda liger: liger.LigerSiLUMulFunction.apply),
    paired(
        "geglu",
        liger=lambda liger: liger.LigerGELUMulFunction.apply,
        note="Liger-Kernel's geglu has the GELU by tanh, all others the exact one",
    ),
    paired("mish_scale"),
    biased("bias_gelu"),
    biased("bias_relu", (0,)),
    biased("bias_silu"),
    Case(
        "prelu_bias",
        "elementwise",
        lambda make, rows, columns: (make.normal(rows, columns), make.uniform(columns), make.normal(columns)),
        eager=lambda x, weight, bias: F.prelu(x + bias, weight),
        gradients=(0, 1, 2),
    ),
    Case(
        "gelu_dropout",
        "elementwise",
        one,
        lambda ops: lambda x: ops.gelu_dropout(x, P),
        gradients=(0,),
        exact=(lambda x: F.gelu(x) / (1 - P), lambda x: 0 * x),
    ),
    Case(
        "bias_dropout_add",
        "elementwise",
        lambda make, rows, columns: (*with_row(make, rows, columns), make.normal(rows, columns)),
        lambda ops: lambda x, bias, added: ops.bias_dropout_add(x, bias, added, P),
        gradients=(0, 1, 2),
        reads=(),
        exact=(lambda x, b, added: (x + b) / (1 - P) + added, lambda x, b, added: 0 * (x + b) + added),
    ),
    *quantizations("by tensor", lambda make, columns: scale_and_zero_point(make, 1)),
    *quantizations("by channel", scale_and_zero_point),
    normalization("to planes", torch.contiguous_format),
    normalization("channels last", torch.channels_last),
)


def layer_norm_case(activation: str, function: Function) -> Case:
    name = f"layer_norm_{activation}"
    return Case(
        name,
        "norm",
        with_weight_and_bias,
        lambda ops: lambda x, w, b: getattr(ops, name)(x, x.shape[-1:], w, b),
        lambda x, w, b: function(F.layer_norm(x, x.shape[-1:], w, b)),
        gradients=(0, 1, 2),
    )


def plain_add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.layer_norm(total, x.shape[-1:], w, b), total


def plain_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.rms_norm(total, x.shape[-1:], w, EPS), total


def groups_of(x: Tensor) -> int:
    return math.gcd(32, x.shape[1])


def liger_group_norm_silu(liger: Any) -> Function:
    norm = liger.LigerGroupNormFunction.apply
    return lambda x, w, b: F.silu(norm(x, w, b, x.shape[1], groups_of(x), 1e-5))


def norm_of_image(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    x = image(make, rows, columns)
    return x, make.uniform(x.shape[1]), make.normal(x.shape[1])


def batch_norm_of_image(make: Maker, rows: int, columns: int) -> tuple[Tensor, ...]:
    x, weight, bias = norm_of_image(make, rows, columns)
    return x, weight, bias, make.normal(x.shape[1]), make.uniform(x.shape[1])


NORMS = (
    Case(
        "layer_norm_act, no activation",
        "norm",
        with_weight_and_bias,
        lambda ops: lambda x, w, b: ops.layer_norm_act(x, x.shape[-1:], w, b),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        gradients=(0, 1, 2),
        liger=lambda liger: lambda x, w, b: liger.LigerLayerNormFunction.apply(x, w, b, 1e-5),
    ),
    layer_norm_case("relu", F.relu),
    layer_norm_case("gelu", F.gelu),
    layer_norm_case("silu", F.silu),
    Case(
        "add_layer_norm",
        "norm",
        residual,
        lambda ops: lambda x, r, w, b: ops.add_layer_norm(x, r, x.shape[-1:], w, b),
        plain_add_layer_norm,
        gradients=(0, 1, 2, 3),
        reads=(0, 2),
    ),
    Case(
        "rms_norm",
        "norm",
        with_weight,
        lambda ops: lambda x, w: ops.rms_norm(x, x.shape[-1:], w, EPS),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
        gradients=(0, 1),
        liger=lambda liger: lambda x, w: liger.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
    ),
    Case(
        "add_rms_norm",
        "norm",
        lambda make, rows, columns: residual(make, rows, columns)[:3],
        lambda ops: lambda x, r, w: ops.add_rms_norm(x, r, x.shape[-1:], w, EPS),
        plain_add_rms_norm,
        gradients=(0, 1, 2),
        reads=(0, 2),
        liger=lambda liger: lambda x, r, w: liger.LigerFusedAddRMSNormFunction.apply(x, r, w, EPS),
    ),
    Case(
        "rms_norm_gelu",
        "norm",
        with_weight,
        lambda ops: lambda x, w: ops.rms_norm_gelu(x, x.shape[-1:], w, EPS),
        lambda x, w: F.gelu(F.rms_norm(x, x.shape[-1:], w, EPS)),
        gradients=(0, 1),
    ),
    Case(
        "group_norm_silu",
        "norm",
        norm_of_image,
        lambda ops: lambda x, w, b: ops.group_norm_silu(x, groups_of(x), w, b),
        gradients=(0, 1, 2),
        liger=liger_group_norm_silu,
        note="Liger-Kernel has the group norm without SiLU, which follows as a call of its own",
    ),
    Case("batch_norm_relu", "norm", batch_norm_of_image, gradients=(0, 1, 2)),
)

REDUCTIONS = (
    Case(
        "softmax",
        "reduction",
        one,
        eager=lambda x: torch.softmax(x, -1),
        gradients=(0,),
        liger=lambda liger: liger.LigerSoftmaxFunction.apply,
    ),
    Case(
        "softmax, scaled and masked",
        "reduction",
        lambda make, rows, columns: (make.normal(rows, columns), make.uniform(rows, columns) < 1.3),
        lambda ops: lambda x, mask: ops.softmax(x, scale=SCALE, mask=mask),
        lambda x, mask: torch.softmax((x * SCALE).masked_fill(~mask, float("-inf")), -1),
        gradients=(0,),
        reads=(0,),
    ),
    Case(
        "cross_entropy",
        "reduction",
        lambda make, rows, columns: (make.normal(rows, columns), make.integers(0, columns, rows)),
        eager=F.cross_entropy,
        gradients=(0,),
        liger=lambda liger: lambda x, target: liger.LigerCrossEntropyFunction.apply(x, target, None)[0],
        joint=True,
        note="Liger-Kernel's cross_entropy computes the gradient in its forward: compare the rows of both",
        more_sizes=(VOCABULARY,),
    ),
    Case("mse_loss", "reduction", pair, eager=F.mse_loss, gradients=(0,)),
    Case(
        "reduce_sum_squared",
        "reduction",
        one,
        lambda ops: lambda x: ops.reduce_sum_squared(x, dim=-1),
        lambda x: x.square().sum(-1),
        gradients=(0,),
    ),
    Case(
        "reduce_mean_abs",
        "reduction",
        one,
        lambda ops: lambda x: ops.reduce_mean_abs(x, dim=-1),
        lambda x: x.abs().mean(-1),
        gradients=(0,),
    ),
)

CASES = (*ELEMENTWISE, *NORMS, *REDUCTIONS)
