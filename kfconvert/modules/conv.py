"""Convolution, batch normalization, residual addition and activation in one module."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.activations import apply_activation
from ..ops.fused.bias_act import bias_act
from ..ops.fused.conv_act import conv_act
from ..ops.fused.linear_act import linear_act
from ..ops.fused.scale_shift_act import scale_shift_act
from ..ops.registration import has_kernels
from .base import CHANNELS_LAST, FusedModule, Plan, is_too_narrow, require_plain
from .batch_norm import batch_norm, scale_and_shift
from .onednn import in_place, pointwise, runs_onednn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = {2 + d: (getattr(nn, f"BatchNorm{d}d"), nn.SyncBatchNorm) for d in (1, 2, 3)}
# The sizes of depthwise kernels and their strides for which kfconvert has kernels.
_DEPTHWISE = {(3, 3, 1, 1), (3, 3, 2, 2), (5, 5, 1, 1), (5, 5, 2, 2), (7, 7, 1, 1)}
_CUDNN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Geometry:
    """A convolution's arguments, with ``padding`` resolved.

    ``pad``: widths for ``F.pad`` (last dimension first), with ``pad_mode``, or None; ``padding``: the padding of
    the convolution itself.
    """

    pad: tuple[int, ...] | None
    pad_mode: str
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, conv) -> "_Geometry":
        # The widths of each dimension twice, last dimension first; for padding="same" they may differ.
        widths = tuple(conv._reversed_padding_repeated_twice)
        by_conv = conv.padding_mode == "zeros" and widths[::2] == widths[1::2]
        return cls(
            widths if any(widths) and not by_conv else None,
            "constant" if conv.padding_mode == "zeros" else conv.padding_mode,
            widths[::-2] if by_conv else (0,) * len(conv.kernel_size),
            conv.stride,
            conv.dilation,
            conv.groups,
        )

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes the convolution in plain ATen calls."""
        call = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
        return call(self.apply(x), weight, bias, *self.arguments)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups

    def is_linear(self, weight: torch.Tensor) -> bool:
        """Whether this convolution is a linear layer over the channels for images of one pixel."""
        return weight.shape[2:].numel() == 1 and self.groups == 1 and self.pad is None and not any(self.padding)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.pad is None else F.pad(x, self.pad, self.pad_mode)


class FusedConvBN(FusedModule):
    """``y = act(bn(conv(x)) + residual)``: an ``nn.Conv1d/2d/3d``, its ``nn.BatchNorm`` or None, an optional residual
    and an activation.

    x: (N, C_in, *spatial); residual: the shape of y, or None; y: (N, C_out, *spatial_out). float64, float32,
    float16, bfloat16. Both modules are submodules ``conv`` and ``bn``, shared and not copied; their hooks do not run.

    In eval mode, bn is folded into the convolution, with s = bn.weight / sqrt(running_var + eps):
        W' = W s,  b' = (b - running_mean) s + bn.bias        (in float64, then cast once to the dtype of W)
    from the live parameters, and again after each change. In float16, "composition" runs if W' or b' exceed the range.
    If bn uses batch statistics (``bn.training`` or ``track_running_stats=False``), it is not folded, and only the rest
    is fused.

    ``channels_last``: convert inputs and weights of 2d and 3d convolutions to channels-last; y is channels-last
    too. Otherwise y has the memory format of the convolution's result.
    Strategies: "linear" (a 1x1 kernel on an image of one pixel), "onednn" (CPU, float32, 2d and 3d), "cudnn"
    (CUDA, ReLU: convolution, addition and ReLU in one call), "depthwise" (CUDA, half types, channels-last, a filter
    for each channel: kfconvert's kernels), "kernel" (``kfconvert.ops.conv_act``; "folded" where it has no compiled
    kernel: plain ATen on folded weights), "composition" (not folded).
    TypeError: not a convolution or not a batch norm of as many dimensions, lazy, quantized. ValueError:
    parametrized or weight-normalized, channels that do not fit, unknown activation.
    """

    default_activation = "none"
    live_strategies = ("composition",)

    def __init__(
        self, conv: nn.Module, bn: nn.Module | None = None, activation: str | None = None, negative_slope: float = 0.01
    ):
        super().__init__(activation or self.default_activation, negative_slope)
        require_plain(conv, _CONVOLUTIONS, "an nn.Conv1d, nn.Conv2d or nn.Conv3d")
        if bn is not None:
            norms = _NORMS[conv.weight.dim()]
            require_plain(bn, norms, f"an nn.{norms[0].__name__}")
            if bn.num_features != conv.out_channels:
                raise ValueError(
                    f"the convolution has {conv.out_channels} output channels, the batch norm {bn.num_features}"
                )
        self.conv = conv
        self.register_module("bn", bn)
        self.channels_last = False
        self.training = conv.training if bn is None else bn.training

    @classmethod
    def examples(cls):
        dimensions = getattr(cls, "dimensions", 2)
        conv, norm = _CONVOLUTIONS[dimensions - 1](4, 6, 3), _NORMS[dimensions + 2][0](6)
        images = torch.randn(2, 4, *[5] * dimensions), torch.randn(2, 6, *[3] * dimensions)
        for bn, inputs in ((norm, images), (None, images[:1])):
            yield cls(conv, bn).eval(), inputs

    def strategies(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> list[str]:
        names = ["kernel" if has_kernels(x) else "folded", "composition"]
        weight = self.conv.weight
        # oneDNN of PyTorch 2.11 cannot add to a result of a single channel.
        fits = weight.dtype == x.dtype and weight.device == x.device and (residual is None or weight.shape[0] > 1)
        if fits and weight.dim() in CHANNELS_LAST and runs_onednn(x):
            # ResNet-50, batch 1, one thread, CPU ms in one run: eager 207; channels-last packed 145, kernel
            # 190; contiguous packed 225, kernel 192, because results are converted to contiguous.
            names.insert(0 if self._uses_channels_last(x) else 1, "onednn")
        images = x.is_cuda and x.dim() in CHANNELS_LAST and x.dtype in _CUDNN_DTYPES
        if images and self.activation == "relu" and torch.backends.cudnn.enabled:
            names.insert(0, "cudnn")
        if images and residual is None and self._has_depthwise_kernel(x):
            # ConvNeXt-T on an H200, batch 32, us of a 7x7 kernel on 56, 28, 14, 7 pixels: cuDNN 71, 43, 23, 17;
            # this 24, 14, 9, 6.
            names.insert(0, "depthwise")
        if x.numel() > 0 and x.shape[2:].numel() == 1 and _Geometry.of(self.conv).is_linear(weight):
            # 1024 to 1280 channels, CPU us of 1 thread at batch 1, 8, 32 and error: ATen 283, 2025, 7823,
            # 1.6e-7; oneDNN 379, 2277, 8339, 5.1e-7; this 287, 737, 1865, 1.5e-7.
            names.insert(0, "linear")
        return names

    def _has_depthwise_kernel(self, x: torch.Tensor) -> bool:
        conv: Any = self.conv
        weight, geometry = conv.weight, _Geometry.of(conv)
        out, inner, *kernel = weight.shape
        return (
            has_kernels(x)
            and x.dim() == 4
            and x.dtype == weight.dtype
            and x.dtype in (torch.float16, torch.bfloat16)
            and self._uses_channels_last(x)
            and (inner, geometry.groups, out % 8) == (1, out, 0)
            and (*kernel, *geometry.stride) in _DEPTHWISE
            and geometry.dilation == (1, 1)
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the module's result. x: (N, C_in, *spatial), residual: as the result or None; returns (N, C_out,
        *spatial_out)."""
        conv, bn = self.conv, self.bn
        if x.dim() != conv.weight.dim():
            raise ValueError(f"expected an input of {conv.weight.dim()} dimensions, got shape {tuple(x.shape)}")
        if self._uses_batch_statistics():
            y = bn(conv(self._formatted(x)))
            return bias_act(y, None, residual, self.activation, self.negative_slope, dim=1)
        return super().forward(x) if residual is None else super().forward(x, residual)

    def plan(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Plan:
        """Raises ValueError if bn uses the statistics of the batch."""
        if self._uses_batch_statistics():
            raise ValueError("a batch norm that uses the statistics of the batch has no plan")
        return self._plan(*self._variant(x, residual), self._prepared(self.sources()), x)

    def _uses_batch_statistics(self) -> bool:
        return self.bn is not None and (self.bn.training or self.bn.running_mean is None)

    def _variant(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[str, bool]:
        """The strategy, and whether results are channels-last. Raises ValueError if ``residual`` does not fit."""
        self._check_residual(x, residual)
        return self.choose(x, residual), self._uses_channels_last(x)

    def _formatted(self, x: torch.Tensor) -> torch.Tensor:
        return self._formatter(x.dim())(x)

    def _formatter(self, dimensions: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that converts tensors with ``dimensions`` dimensions to channels-last, if requested."""
        if not self.channels_last or dimensions not in CHANNELS_LAST:
            return lambda x: x
        return partial(torch.Tensor.contiguous, memory_format=CHANNELS_LAST[dimensions])

    def _check_residual(self, x, residual):
        # oneDNN does not check the shape of the residual.
        if residual is None:
            return
        weight = self.conv.weight.detach().to("meta")
        expected = tuple(_Geometry.of(self.conv).convolve(x.detach().to("meta"), weight, None).shape)
        if residual.shape != expected or residual.dtype != x.dtype:
            raise ValueError(
                f"residual must have the result's shape {expected} and dtype {x.dtype}, "
                f"got {tuple(residual.shape)} and {residual.dtype}"
            )

    def differentiable(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        geometry = _Geometry.of(self.conv)
        # A graph would fold the weights in each call, and folded weights may exceed float16.
        unfolded = torch.compiler.is_compiling() or torch._C._get_tracing_state() or x.dtype == torch.float16
        if self.bn is not None and unfolded and not torch.is_autocast_enabled(x.device.type):
            return self._unfolded(geometry, x, residual)
        folded = self._rounded(*self._exactly_folded())
        arguments = (*folded, residual, *geometry.arguments, self.activation, self.negative_slope)
        return conv_act(geometry.apply(self._formatted(x)), *arguments)

    def _unfolded(self, geometry: _Geometry, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The convolution with unfolded weights, then the batch norm as a scale and a shift."""
        conv, bn = self.conv, self.bn
        y = geometry.convolve(self._formatted(x), conv.weight, conv.bias)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        scale, shift = (tensor.to(wide) for tensor in scale_and_shift(bn))
        if residual is None:
            return scale_shift_act(y, scale, shift, self.activation, self.negative_slope)
        return bias_act(scale_shift_act(y, scale, shift), None, residual, self.activation, self.negative_slope, dim=1)

    def _folded_in_range(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The folded weight and bias; None if they exceed the range of the dtype."""
        exact = self._exactly_folded()
        folded = self._rounded(*exact)
        return None if self.bn is not None and any(map(is_too_narrow, folded, exact)) else folded

    def _rounded(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = self.conv.weight.dtype
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _exactly_folded(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        conv, bn = self.conv, self.bn
        if bn is None:
            return conv.weight, conv.bias
        scale, shift = scale_and_shift(bn)
        weight = conv.weight.double() * scale.reshape(-1, *[1] * (conv.weight.dim() - 1))
        return weight, shift if conv.bias is None else conv.bias.double() * scale + shift

    def _uses_channels_last(self, x: torch.Tensor) -> bool:
        """Whether the result is channels-last: if requested, or, as in ATen, if the input or weight is."""
        if x.dim() not in CHANNELS_LAST:
            return False
        return self.channels_last or any(
            t.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]) and not t.is_contiguous()
            for t in (x, self.conv.weight)
        )

    def _plan(self, strategy: str, channels_last: bool, values: dict, x: torch.Tensor) -> Plan:
        formatted = self._formatter(x.dim())
        if strategy == "composition":
            return lambda x, residual=None: self.reference(formatted(x), residual)
        if "folded" not in values:
            # The folded weights outlive this call, so they must not require gradients or be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                values["folded"] = self._folded_in_range()
        if values["folded"] is None:
            return self._plan("composition", channels_last, values, x)
        weight, bias = values["folded"]
        geometry = _Geometry.of(self.conv)
        memory_format = CHANNELS_LAST[x.dim()] if channels_last else torch.contiguous_format
        if strategy == "onednn":
            return _OneDNNConv(weight, bias, geometry, memory_format, self.activation, self.negative_slope, x)
        if strategy == "cudnn":
            return _cudnn_call(weight.contiguous(memory_format=memory_format), bias, geometry, formatted)
        if strategy == "depthwise":
            # This memory order, (kernel, channels), selects the operator's own kernels.
            laid_out = weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        else:
            laid_out = weight.contiguous(memory_format=memory_format)
        arguments = (*geometry.arguments, self.activation, self.negative_slope)

        def kernel(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            return conv_act(geometry.apply(formatted(x)), laid_out, bias, residual, *arguments)

        if strategy == "linear":
            return _linear_call(weight, bias, self.activation, self.negative_slope, channels_last, kernel)
        if geometry.pad is None and not self.channels_last:
            return lambda x, residual=None: conv_act(x, laid_out, bias, residual, *arguments)
        return kernel

    def reference(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the result in plain ATen calls, without writing running statistics."""
        conv, bn = self.conv, self.bn
        geometry = _Geometry.of(conv)
        y = geometry.convolve(x, conv.weight, conv.bias)
        if bn is not None:
            y = batch_norm(bn, y)
        if residual is not None:
            y = y + residual
        return apply_activation(y, self.activation, self.negative_slope)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, channels_last={self.channels_last}"


def _cudnn_call(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: _Geometry,
    formatted: Callable[[torch.Tensor], torch.Tensor],
) -> Plan:
    """Returns a single cuDNN call for convolution, bias, addition and ReLU, without the operator's checks."""
    if bias is None:  # else cuDNN creates zeros in each call
        bias = weight.new_zeros(weight.shape[0])
    arguments = (bias, *geometry.arguments)
    convolve_relu, convolve_add_relu = torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu

    def call(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = geometry.apply(formatted(x))
        if residual is None:
            return convolve_relu(x, weight, *arguments)
        return convolve_add_relu(x, weight, formatted(residual), 1.0, *arguments)

    return call


def _linear_call(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    negative_slope: float,
    channels_last: bool,
    otherwise: Plan,
) -> Plan:
    """Returns a linear layer for images of one pixel, and ``otherwise`` for others."""
    weight, ones = weight.flatten(1), (1,) * (weight.dim() - 2)

    def call(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[2:] != ones:
            return otherwise(x, residual)
        if residual is None:
            y = linear_act(x.flatten(1), weight, bias, activation, negative_slope)
        else:
            y = bias_act(F.linear(x.flatten(1), weight, bias), None, residual.flatten(1), activation, negative_slope)
        rows, channels = y.shape
        return y.view(rows, *ones, channels).movedim(-1, 1) if channels_last else y.view(rows, channels, *ones)

    return call


class _OneDNNConv:
    """A convolution with a packed weight, a fused addition, and a fused activation if that keeps NaN."""

    def __init__(self, weight, bias, geometry, memory_format, activation, negative_slope, x):
        self.geometry, self.memory_format = geometry, memory_format
        # oneDNN ignores the strides of the bias.
        self.bias = None if bias is None else bias.contiguous()
        self.pointwise, self.finish = pointwise(activation, negative_slope)
        # After an addition, oneDNN only fuses relu, and drops NaN.
        self.finish_sum = in_place(activation, negative_slope)
        self.arguments = (geometry.padding, geometry.stride, geometry.dilation, geometry.groups)
        self.packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *self.arguments, geometry.apply(x).shape)

    def __call__(self, x, residual=None):
        x = self.geometry.apply(x)
        call = torch.ops.mkldnn._convolution_pointwise
        if residual is None:
            y, finish = call.default(x, self.packed, self.bias, *self.arguments, *self.pointwise), self.finish
        else:
            y = call.binary(x, residual, self.packed, self.bias, *self.arguments, "add", 1.0, None, [], "")
            finish = self.finish_sum
        if finish is not None:
            finish(y)
        return y.contiguous(memory_format=self.memory_format)


class _FixedDimensions(FusedConvBN):
    dimensions: int

    def __init__(self, conv: nn.Module, bn: nn.Module | None = None):
        super().__init__(conv, bn)
        if conv.weight.dim() != self.dimensions + 2:
            raise TypeError(f"expected an nn.Conv{self.dimensions}d, got {type(conv).__name__}")


class FusedConv2dBN(_FixedDimensions, dimensions=2):
    """``bn(conv2d(x)) + residual``; see :class:`FusedConvBN`."""


class FusedConv1dBNReLU(_FixedDimensions, dimensions=1, default_activation="relu"):
    """``relu(bn(conv1d(x)) + residual)``; see :class:`FusedConvBN`."""


class FusedConv2dBNReLU(_FixedDimensions, dimensions=2, default_activation="relu"):
    """``relu(bn(conv2d(x)) + residual)``; see :class:`FusedConvBN`."""


class FusedConv3dBNReLU(_FixedDimensions, dimensions=3, default_activation="relu"):
    """``relu(bn(conv3d(x)) + residual)``; see :class:`FusedConvBN`."""


class FusedConv2dBNReLU6(_FixedDimensions, dimensions=2, default_activation="relu6"):
    """``relu6(bn(conv2d(x)) + residual)``; see :class:`FusedConvBN`."""


class FusedConv2dBNSiLU(_FixedDimensions, dimensions=2, default_activation="silu"):
    """``silu(bn(conv2d(x)) + residual)``; see :class:`FusedConvBN`."""


class FusedConv2dBNHardswish(_FixedDimensions, dimensions=2, default_activation="hardswish"):
    """``hardswish(bn(conv2d(x)) + residual)``; see :class:`FusedConvBN`."""
