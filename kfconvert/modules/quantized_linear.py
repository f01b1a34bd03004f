"""Linear layers with quantized weights: ``y = x (q * scale)^T`` with int8 or float8 numbers q."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..ops.fused.quantized_linear import NUMBERS, takes_few_rows
from .base import FusedModule, Plan, held
from .few_rows import FewRows

# ATen's CPU kernel takes bfloat16 at memory bandwidth. ms on one core, 1024 to 2816 features, at 1, 16 and 64 rows:
# 0.15, 1.2, 4.8; with a cast of the weight in each call: 0.60, 0.98, 2.2. In float32 and float16 it is always slower.
_PACKED_MOST_ROWS = 8
# It reads past the ends of rows whose length is not a multiple of this, and crashes for unaligned memory.
_PACKED_MULTIPLE = 16
_PACKED_ALIGNMENT = 64  # bytes, as PyTorch allocates


def _takes_packed(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ATen's CPU kernel computes the product correctly, and at memory bandwidth."""
    if x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.int8 or not weight.is_contiguous():
        return False
    in_words = weight.shape[1] % _PACKED_MULTIPLE == 0 and weight.data_ptr() % _PACKED_ALIGNMENT == 0
    return in_words and 0 < x.numel() <= _PACKED_MOST_ROWS * weight.shape[1]


class FusedQuantizedLinear(FusedModule):
    """``y = x (q * scale)^T``, a linear layer with a quantized weight (weights only), as torchao computes it.

    x: (..., in_features), a float dtype; q: (out_features, in_features), int8 or float8_e4m3fn; scale: one number for
    each row of q; y: (..., out_features). The state dict has the keys "weight" (q) and "scale".

    ``scales_weight``: whether the composition scales the weight (float8 of torchao), or the product (int8).
    Strategies: "skinny" (CUDA, float16 and bfloat16, up to 64 rows: a kernel of this package, which reads only q),
    "int8pack" (CPU, bfloat16 and int8, a few rows: ATen's kernel), "product" (only with ``scales_weight``, not for
    float16, which may overflow: scales the product), and "composition", which casts the whole weight in each call. All
    read the live tensors. If a gradient is needed, under autocast and under ``torch.compile``, the composition runs.
    """

    live_strategies = (*FusedModule.live_strategies, "skinny", "int8pack", "product")
    is_chosen_for_steps = True
    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, *_, **__):
        raise TypeError("create a FusedQuantizedLinear from tensors: FusedQuantizedLinear.from_tensors(weight, scale)")

    @classmethod
    def from_tensors(
        cls, weight: torch.Tensor, scale: torch.Tensor, scales_weight: bool = False
    ) -> "FusedQuantizedLinear":
        """Creates a module that shares ``weight`` (out, in), int8 or float8_e4m3fn, and ``scale``, (out,) or (out, 1).

        Parameters stay parameters, and plain tensors become buffers. Raises TypeError for another dtype, ValueError for
        shapes that do not match.
        """
        if weight.dtype not in NUMBERS:
            raise TypeError(f"weight has dtype {weight.dtype}, expected int8 or float8_e4m3fn")
        if weight.dim() != 2 or scale.shape not in ((weight.shape[0],), (weight.shape[0], 1)):
            raise ValueError(f"scale of shape {tuple(scale.shape)} does not fit weight of shape {tuple(weight.shape)}")
        module = cls.__new__(cls)
        FusedModule.__init__(module)
        module._set_tensors(weight=weight, scale=scale)
        module.scales_weight = scales_weight
        return module

    @classmethod
    def examples(cls):
        weight = torch.randint(1, 128, (6, 16), dtype=torch.int8)  # both ways to scale round alike
        for scales_weight in (False, True):
            yield (
                cls.from_tensors(weight.clone(), torch.nn.Parameter(torch.rand(6, 1) / 64), scales_weight),
                (torch.rand(5, 16),),
            )

    def strategies(self, x: torch.Tensor) -> list[str]:
        weight = held(self, "weight")
        offered = {
            "skinny": takes_few_rows(x, weight),
            "int8pack": _takes_packed(x, weight),
            "product": self.scales_weight and x.dtype != torch.float16,
            "composition": True,
        }
        return [name for name, is_offered in offered.items() if is_offered]

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        return self.reference if strategy == "composition" else getattr(self, f"_{strategy}")

    def _skinny(self, x: torch.Tensor) -> torch.Tensor:
        return self.few_rows().run(x) if takes_few_rows(x, held(self, "weight")) else self.reference(x)

    def few_rows(self) -> FewRows:
        """Returns the product for few rows of x, by one kernel."""
        return product_of([self])

    def _int8pack(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale = held(self, "weight"), held(self, "scale")
        # A plan meets any number of rows, and later weights, for example from a file that is mapped to memory.
        if not _takes_packed(x, weight):
            return self.reference(x)
        rows = x.reshape(-1, weight.shape[1]).contiguous()
        rows = rows.clone() if rows.data_ptr() % _PACKED_ALIGNMENT else rows
        scales = scale.to(x.dtype).flatten().contiguous()
        y = torch.ops.aten._weight_int8pack_mm.default(rows, weight, scales)
        return y.view(*x.shape[:-1], weight.shape[0])

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, held(self, "weight").to(x.dtype)) * held(self, "scale").to(x.dtype).flatten()

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scales_weight:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype).flatten()
        scale = self.scale.reshape(-1, 1)
        return F.linear(x, (self.weight.to(scale.dtype) * scale).to(x.dtype))

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        sizes = f"in_features={in_features}, out_features={out_features}, numbers={self.weight.dtype}"
        strategy = f", strategy={self.strategy!r}" if self.strategy is not None else ""
        return f"{sizes}, scales_weight={self.scales_weight}{strategy}"


def product_of(linears: Sequence[FusedQuantizedLinear], **options) -> FewRows:
    """Returns the outputs of ``linears`` side by side, for few rows of x by one kernel. ``options``: as of FewRows."""
    weights, scales = (tuple([held(linear, name) for linear in linears]) for name in ("weight", "scale"))
    return FewRows(weights, scales, **options)
