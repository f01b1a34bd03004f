"""Linear layers with an activation: ``y = act(x W^T + b)``."""

import functools
import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from .. import kernels
from ..extension import EXTENSION_LOADED
from ..ops.activations import ACTIVATIONS, apply_activation
from ..ops.fused.linear_act import linear_act, linear_triton
from ..ops.fused.skinny_linear import takes_skinny
from ..ops.registration import has_kernels
from .base import FusedModule, Plan, gelu_name, held, held_of, require_float_tensor, require_plain
from .few_rows import FewRows
from .onednn import HAS_MKL, pointwise, runs_onednn

# Below 16 rows the packed products sum in another order than ATen: mean error 2.4 x (768 inputs), 1.4 to 2.1
# x (3072). From 16 rows on MKL's error is ATen's (1.00 x) and it is faster, ms on 2 cores: 768x768 at 16 rows
# 0.19 against 0.31; at 128 rows 2.9 against 3.4 (768 to 3072, gelu), 2.5 against 3.7 (3072 to 768).
_PACKED_MIN_ROWS = 16
# A pack of MKL takes 8 to 11 MB more than its weight, for any size.
MKL_MIN_WEIGHT_BYTES = 2**20
# Fast cuBLAS kernels need rows at multiples of 16 bytes. For GPT-2's 50,257 columns at 4,096 rows, float16, the only
# other kernel took 3.1 ms on an H100.
_ROW_BYTES = 16
_HALF_TYPES = (torch.float16, torch.bfloat16)
# Activations with a cuBLASLt epilogue, and whether it is GELU.
_EPILOGUES = {"relu": False, "gelu_tanh": True}
_Linear = TypeVar("_Linear", bound="FusedLinear")


def takes_triton(x: torch.Tensor, weight: torch.Tensor, activation: str) -> bool:
    """Whether Triton's kernel, on x (..., in_features), may be faster than the library's. Imports Triton if it may."""
    wanted = x.dtype == torch.float32 or (x.dtype in _HALF_TYPES and activation not in ("none", *_EPILOGUES))
    return wanted and x.is_cuda and has_kernels(x) and has_triton(x.device) and kernels.triton.linear.takes(x, weight)


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernel, which is registered here, can run on a device: TF32 needs compute capability 8.0."""
    try:
        return torch.cuda.get_device_capability(device) >= (8, 0) and bool(kernels.triton.__all__)
    except ImportError:
        return False


class FusedLinear(FusedModule):
    """``y = act(x W^T + b)``, an ``nn.Linear`` and the activation after it.

    x: (..., in_features); weight: (out_features, in_features), or (in_features, out_features) when
    ``transposed``; bias: (out_features,) or None; y: (..., out_features). float64, float32, float16 or
    bfloat16, all of one dtype and device. Initialized like ``nn.Linear``; the state dict has the keys
    "weight" and "bias".

    ``activation``: one of ``kfconvert.ops.ACTIVATIONS``, or None for the default of the class. Raises ValueError for
    any other name.
    Strategies: "mkl" and "onednn" (CPU, float32, packed weights), "kernel" (``kfconvert.ops.linear_act``),
    "composition", and on CUDA for float16 and bfloat16: "skinny" (up to 16 rows, a kernel of this package), "epilogue"
    (bias and ReLU or tanh GELU in cuBLASLt's product) and "padded" (product with rows padded to a multiple of 16 bytes,
    then a copy). "triton" (CUDA, if Triton is installed) computes everything in one kernel: from 64 rows on, float32 on
    tensor cores with float32's accuracy; for more rows, on compute capability 9.0, half types and an activation without
    an epilogue. Packed weights are a cache that is updated with the parameters (see :class:`~.derived.Derived`). If a
    gradient is needed, under autocast and under ``torch.compile``, ``kfconvert.ops.linear_act`` runs.
    """

    default_activation = "none"
    live_strategies = (*FusedModule.live_strategies, "skinny", "epilogue", "padded", "triton")
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        negative_slope: float = 0.01,
        device=None,
        dtype=None,
    ):
        super().__init__(activation or self.default_activation, negative_slope)
        self.transposed = False
        self._set_tensors(
            weight=nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype)),
            bias=nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None,
        )
        self.reset_parameters()

    @classmethod
    def examples(cls):
        yield cls(8, 6), (torch.randn(20, 8),)

    @classmethod
    def from_tensors(
        cls: type[_Linear],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
        negative_slope: float = 0.01,
        transposed: bool = False,
    ) -> _Linear:
        """Creates a module that shares ``weight`` (out, in), or (in, out) if ``transposed``, and ``bias`` (out,).

        Parameters stay parameters, and plain tensors become buffers. Raises TypeError for tensors that are not plain
        floats, ValueError for shapes that do not match.
        """
        require_float_tensor(weight, "weight")
        if weight.dim() != 2:
            raise ValueError(f"weight must have 2 dimensions, got shape {tuple(weight.shape)}")
        out_features = weight.shape[1 if transposed else 0]
        if bias is not None:
            require_float_tensor(bias, "bias")
            if bias.shape != (out_features,):
                raise ValueError(f"bias must have shape ({out_features},), got {tuple(bias.shape)}")
        module = cls.__new__(cls)
        FusedModule.__init__(module, activation or cls.default_activation, negative_slope)
        module._set_tensors(weight=weight, bias=bias)
        module.transposed = transposed
        return module

    @classmethod
    def from_linear(
        cls: type[_Linear], linear: nn.Module, activation: str | None = None, negative_slope: float = 0.01
    ) -> _Linear:
        """Creates a module that shares the parameters of an ``nn.Linear`` or Hugging Face ``Conv1D``, weight (in, out).

        Raises TypeError for lazy, quantized and other modules, ValueError for parametrized and weight-normalized
        modules.
        """
        kind = type(linear)
        transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        require_plain(linear, (kind if transposed else nn.Linear,), "an nn.Linear or a Hugging Face Conv1D")
        module = cls.from_tensors(linear.weight, linear.bias, activation, negative_slope, transposed)
        return module.train(linear.training)

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    def reset_parameters(self) -> None:
        """Initializes weight and bias like ``nn.Linear``: uniform in +-1/sqrt(in_features)."""
        nn.init.kaiming_uniform_(self.oriented(self.weight), a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    def oriented(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns ``weight``, in the module's layout, as (out_features, in_features)."""
        return weight.t() if self.transposed else weight

    def strategies(self, x: torch.Tensor) -> list[str]:
        names = super().strategies(x)
        weight = held(self, "weight")
        if weight.dtype != x.dtype or weight.device != x.device:
            return names
        half = x.is_cuda and x.dtype in _HALF_TYPES
        packed = runs_onednn(x) and x.numel() >= _PACKED_MIN_ROWS * x.shape[-1]
        offered = {
            "mkl": packed and HAS_MKL and weight.nbytes >= MKL_MIN_WEIGHT_BYTES,
            "skinny": takes_skinny(x, self.in_features),
            "kernel": len(names) > 1,
            "epilogue": half and self.activation in _EPILOGUES and held(self, "bias") is not None,
            "padded": half and self.out_features * x.element_size() % _ROW_BYTES,
            "triton": takes_triton(x, self.oriented(weight), self.activation),
            "onednn": packed,  # its error is 1.03 x ATen's at 768 inputs, but 1.6 x at 3072
            "composition": True,
        }
        return [name for name, is_offered in offered.items() if is_offered]

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernel(x)

    def sources(self) -> list[torch.Tensor]:
        return held_of(self, "weight", "bias")

    def plan(self, x: torch.Tensor) -> Plan:
        return self._plan(self.choose(x), held(self, "weight"))

    def places(self) -> list[tuple[dict, str]]:
        """The weight is packed, and the bias is read in each call."""
        return [(store, key) for store, key in super().places() if key == "weight"]

    def _kernel(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.oriented(held(self, "weight")), held(self, "bias")
        return linear_act(x, weight, bias, self.activation, self.negative_slope)

    def few_rows(self) -> FewRows:
        """Returns the product for few rows of x, by one kernel."""
        weight, bias = self.oriented(held(self, "weight")), held(self, "bias")
        return FewRows((weight,), bias=bias, code=ACTIVATIONS[self.activation].code, negative_slope=self.negative_slope)

    def _skinny(self, x: torch.Tensor) -> torch.Tensor:
        return self.few_rows().run(x)

    def _triton(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.oriented(held(self, "weight")), held(self, "bias")
        return linear_triton(x, weight, bias, ACTIVATIONS[self.activation].code, self.negative_slope)

    def _epilogue(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.oriented(held(self, "weight")), held(self, "bias")
        rows = x.reshape(-1, x.shape[-1])
        y = torch._addmm_activation(bias, rows, weight.t(), use_gelu=_EPILOGUES[self.activation])
        return y.view(*x.shape[:-1], weight.shape[0])

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.oriented(held(self, "weight")), held(self, "bias")
        columns, whole = weight.shape[0], _ROW_BYTES // x.element_size()
        most = columns // whole * whole
        rows = x.reshape(-1, x.shape[-1])
        padded = x.new_empty((rows.shape[0], most + whole))
        # A separate, slow product computes the few remaining columns.
        for start, end in ((0, most), (most, columns)):
            torch.mm(rows, weight[start:end].t(), out=padded[:, start:end])
        y = padded[:, :columns].contiguous().view(*x.shape[:-1], columns)
        if bias is not None or self.activation != "none":
            code = ACTIVATIONS[self.activation].code
            torch.ops.kfconvert.bias_act_.default(y, bias, None, code, self.negative_slope, -1)
        return y

    def _plan(self, strategy: str, weight: torch.Tensor) -> Plan:
        if strategy in FusedLinear.live_strategies:
            return self.reference if strategy == "composition" else getattr(self, f"_{strategy}")
        weight = self.oriented(weight)
        holder = self._parameters if "bias" in self._parameters else self._buffers
        if strategy == "mkl":
            return _MKLLinear(weight, holder, self.activation, self.negative_slope)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        arguments, finish = pointwise(self.activation, self.negative_slope)
        linear = torch.ops.mkldnn._linear_pointwise.default

        def call(x: torch.Tensor) -> torch.Tensor:
            bias = holder["bias"]
            # oneDNN ignores the strides of the bias.
            y: torch.Tensor = linear(x, packed, bias if bias is None else bias.contiguous(), *arguments)
            return y if finish is None else finish(y)

        return call

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.oriented(self.weight), self.bias)
        return apply_activation(y, self.activation, self.negative_slope)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {super().extra_repr()}"


class _MKLLinear:
    """A linear layer with a weight packed by MKL for one number of rows.

    A pack is valid for that number only, and calls with other numbers use the plain weight. A new number of rows
    is packed when it occurs in two consecutive calls, so that varying lengths do not repack in every call.

    ``holder``: the dict with the bias, a tensor or None, under "bias".
    """

    def __init__(self, weight, holder, activation, negative_slope):
        self.weight, self.holder = weight.contiguous(), holder
        self.activation, self.negative_slope = activation, negative_slope
        self.code = ACTIVATIONS[activation].code
        self.packed = (None, 0)
        self.last_rows = 0

    def __call__(self, x):
        weight = self.weight
        rows = x.numel() // weight.shape[1]
        packed, packed_rows = self.packed
        if rows != packed_rows and (packed is None or rows == self.last_rows):
            packed, packed_rows = self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), rows
        self.last_rows = rows
        bias = self.holder["bias"]
        if EXTENSION_LOADED and (bias is not None or self.activation != "none"):
            # The compiled epilogue adds the bias and applies the activation in one pass, in place.
            y = torch.ops.mkl._mkl_linear.default(x, packed, weight, None, packed_rows)
            torch.ops.kfconvert.bias_act_.default(y, bias, None, self.code, self.negative_slope, -1)
            return y
        y = torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, packed_rows)
        return apply_activation(y, self.activation, self.negative_slope)


class FusedLinearReLU(FusedLinear):
    """``relu(x W^T + b)``; see :class:`FusedLinear`."""

    default_activation = "relu"


class FusedLinearGELU(FusedLinear):
    """``gelu(x W^T + b)``, ``approximate`` "none" (erf) or "tanh"; see :class:`FusedLinear`."""

    default_activation = "gelu"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, approximate: str = "none", device=None, dtype=None
    ):
        super().__init__(in_features, out_features, bias, gelu_name(approximate), device=device, dtype=dtype)


class FusedLinearSiLU(FusedLinear):
    """``silu(x W^T + b)``; see :class:`FusedLinear`."""

    default_activation = "silu"


class FusedLinearTanh(FusedLinear):
    """``tanh(x W^T + b)``; see :class:`FusedLinear`."""

    default_activation = "tanh"


class FusedLinearSigmoid(FusedLinear):
    """``sigmoid(x W^T + b)``; see :class:`FusedLinear`."""

    default_activation = "sigmoid"
