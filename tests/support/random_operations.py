"""The operations that random models are made of: when each applies, its options, its layer, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Operation:
    """``run(layer, tensors, **options)`` computes it, for tensors of which the first satisfies ``applies``.

    ``layer(tensors, **options)``, if any, makes the module that holds the weights. ``writes``: it writes into its
    first tensor. ``options``: a strategy for each option by name.
    """

    run: Callable[..., Tensor]
    applies: Callable[[Tensor], bool]
    options: dict[str, st.SearchStrategy] = field(default_factory=dict)
    layer: Callable[..., nn.Module] | None = None
    arity: int = 1
    writes: bool = False


OPERATIONS: dict[str, Operation] = {}


def _add(name: str, run: Callable[..., Tensor], applies: Callable[[Tensor], bool], **rest: Any) -> None:
    options = {key: rest.pop(key) for key in list(rest) if isinstance(rest[key], st.SearchStrategy)}
    OPERATIONS[name] = Operation(run, applies, options, **rest)


def _real(x: Tensor, least: int = 1, most: int = 5) -> bool:
    return x.is_floating_point() and least <= x.dim() <= most


def _made(layer: nn.Module, x: Tensor) -> nn.Module:
    """``layer`` in the dtype of ``x``, with statistics, scales and shifts that are not 0 and 1."""
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if tensor.dim() == 1 and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5) if name in ("weight", "running_var") else tensor.uniform_(-0.5, 0.5)
    return layer.to(x.dtype)


def _call(layer: nn.Module, tensors: list[Tensor], **options: Any) -> Tensor:
    return layer(*tensors)


# Layers

_flag = st.booleans()
_features = st.sampled_from([6, 4, 8, 1])


def _convolution(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def make(tensors, features, kernel, stride, padding, dilation, grouped, bias, mode):
        channels = tensors[0].shape[1]
        features, groups = (channels, channels) if grouped else (features, 1)
        stride = 1 if padding == "same" else stride
        layer = kind(channels, features, kernel, stride, padding, dilation, groups, bias, padding_mode=mode)
        return _made(layer, tensors[0])

    return make


_convolution_options = {
    "features": st.sampled_from([4, 6, 1]),
    "kernel": st.sampled_from([3, 1, 2]),
    "stride": st.sampled_from([1, 2]),
    "padding": st.sampled_from([1, 0, 2, "same", "valid"]),
    "dilation": st.sampled_from([1, 2]),
    "grouped": _flag,
    "bias": _flag,
    "mode": st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]),
}


class TransposedLinear(nn.Module):
    """GPT-2's ``Conv1D``: ``addmm`` with a weight of shape (in, out)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.bias.shape[0])


class Parameter(nn.Module):
    """A parameter that forward uses directly, over the last ``dimensions`` sizes of its input."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))


_PARAMETER_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, p: x + p,
    "radd": lambda x, p: p + x,
    "mul": lambda x, p: x * p,
    "linear": lambda x, p: F.linear(x, torch.diag(p) if p.dim() == 1 else p),
    "in_place": lambda x, p: (x + 0).mul_(p),
}

_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
_add(
    "linear", _call, _real, features=_features, bias=_flag,
    layer=lambda t, features, bias: _made(nn.Linear(t[0].shape[-1], features, bias), t[0]),
)  # fmt: skip
_add(
    "square_linear", _call, _real, bias=_flag,
    layer=lambda t, bias: _made(nn.Linear(t[0].shape[-1], t[0].shape[-1], bias), t[0]),
)  # fmt: skip
_add(
    "transposed_linear", _call, lambda x: _real(x, 2), features=_features,
    layer=lambda t, features: TransposedLinear(t[0].shape[-1], features).to(t[0].dtype),
)  # fmt: skip
_add("conv1d", _call, lambda x: _real(x, 3, 3), layer=_convolution(nn.Conv1d), **_convolution_options)
_add("conv2d", _call, lambda x: _real(x, 4, 4), layer=_convolution(nn.Conv2d), **_convolution_options)
_add(
    "batch_norm", _call, lambda x: _real(x, 2, 4), affine=_flag, tracked=st.sampled_from([True, True, True, False]),
    layer=lambda t, affine, tracked: _made(
        _BATCH_NORMS[t[0].dim()](t[0].shape[1], affine=affine, track_running_stats=tracked), t[0]
    ),
)  # fmt: skip
_add(
    "layer_norm", _call, lambda x: _real(x, 2), last=st.sampled_from([1, 2]), affine=_flag, bias=_flag,
    layer=lambda t, last, affine, bias: _made(
        nn.LayerNorm(t[0].shape[max(1, t[0].dim() - last) :], 1e-3, affine, bias), t[0]
    ),
)  # fmt: skip
_add(
    "group_norm", _call, lambda x: _real(x, 3) and x.shape[1] % 2 == 0,
    layer=lambda t: _made(nn.GroupNorm(2, t[0].shape[1]), t[0]),
)  # fmt: skip
_add(
    "embedding", lambda layer, t: layer(t[0] % 32), lambda x: x.dtype == torch.int64,
    layer=lambda t: nn.Embedding(32, 6),
)  # fmt: skip
_add(
    "dropout", _call, _real, rate=st.sampled_from([0.5, 0.0]), inplace=_flag,
    layer=lambda t, rate, inplace: nn.Dropout(rate, inplace),
)  # fmt: skip
_add(
    "parameter", lambda layer, t, use: _PARAMETER_USES[use](t[0], layer.value), _real,
    use=st.sampled_from(list(_PARAMETER_USES)),
    layer=lambda t, use: Parameter(t[0].shape[-1:]).to(t[0].dtype),
)  # fmt: skip

# Activations: name -> form -> function

ACTIVATIONS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": {
        "functional": F.relu,
        "written": lambda x: x.clamp(min=0),
        "in_place": torch.relu_,
        "module": nn.ReLU(inplace=True),
    },
    "gelu": {
        "functional": F.gelu,
        "written": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "in_place": torch.ops.aten.gelu_,
        "module": nn.GELU(),
    },
    "gelu_tanh": {
        "functional": lambda x: F.gelu(x, approximate="tanh"),
        "written": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
        "in_place": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
        "module": nn.GELU("tanh"),
    },
    "silu": {
        "functional": F.silu,
        "written": lambda x: x * torch.sigmoid(x),
        "in_place": lambda x: F.silu(x, inplace=True),
        "module": nn.SiLU(inplace=True),
    },
    "tanh": {"functional": torch.tanh, "in_place": torch.tanh_, "module": nn.Tanh()},
    "sigmoid": {"functional": torch.sigmoid, "in_place": torch.sigmoid_, "module": nn.Sigmoid()},
    "relu6": {"functional": F.relu6, "written": lambda x: F.hardtanh(x, 0, 6), "module": nn.ReLU6(inplace=True)},
    "hardswish": {
        "functional": F.hardswish,
        "written": lambda x: x * F.relu6(x + 3) / 6,
        "module": nn.Hardswish(inplace=True),
    },
    "leaky_relu": {
        "functional": lambda x: F.leaky_relu(x, 0.1),
        "in_place": lambda x: F.leaky_relu_(x, 0.3),
        "module": nn.LeakyReLU(),
    },
    "elu": {"functional": F.elu, "in_place": F.elu_},
    "softplus": {"functional": F.softplus},
}
_WRITING = {(name, "in_place") for name in ACTIVATIONS} | {
    (name, "module") for name, forms in ACTIVATIONS.items() if getattr(forms.get("module"), "inplace", False)
}


def _activation_options(writing: bool) -> st.SearchStrategy:
    forms = [(name, form) for name in ACTIVATIONS for form in ACTIVATIONS[name]]
    return st.sampled_from([form for form in forms if (form in _WRITING) is writing])


for _name, _writes in (("activation", False), ("activation_", True)):
    _add(
        _name, lambda layer, t, form: ACTIVATIONS[form[0]][form[1]](t[0]), _real,
        form=_activation_options(_writes), writes=_writes,
    )  # fmt: skip

# Arithmetic of two values, and of one with a number

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "scaled": lambda a, b: torch.add(a, b, alpha=2),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(torch.arange(a.shape[-1]) % 2 == 0, a, b),
}
_WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "copy_": lambda a, b: a.copy_(b),
    "scaled_": lambda a, b: a.add_(b, alpha=2),
    "assign": lambda a, b: a.__setitem__((..., slice(0, 1)), b[..., :1]) or a,
}
_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "mul": lambda x: x * 2,
    "half": lambda x: 0.5 * x,
    "rsub": lambda x: 1 - x,
    "square": lambda x: x * x,
    "halves": lambda x: x / 2,
}
_NUMBERS_WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "first": lambda x: x.__setitem__((..., 0), 1) or x,
    "out": lambda x: torch.mul(x, 2, out=x),
    "neg_": lambda x: x.neg_(),
}
_any = lambda x: x.dim() > 0  # noqa: E731
_add("binary", lambda layer, t, kind: _BINARY[kind](*t), _any, kind=st.sampled_from(list(_BINARY)), arity=2)
_add(
    "binary_", lambda layer, t, kind: _WRITTEN[kind](*t), _any, kind=st.sampled_from(list(_WRITTEN)),
    arity=2, writes=True,
)  # fmt: skip
_add("number", lambda layer, t, kind: _NUMBERS[kind](t[0]), _any, kind=st.sampled_from(list(_NUMBERS)))
_add(
    "number_", lambda layer, t, kind: _NUMBERS_WRITTEN[kind](t[0]), _any,
    kind=st.sampled_from(list(_NUMBERS_WRITTEN)), writes=True,
)  # fmt: skip
_add("matmul", lambda layer, t: torch.matmul(t[0], t[1].transpose(-1, -2)), lambda x: _real(x, 2), arity=2)
_add("attention", lambda layer, t: F.scaled_dot_product_attention(*t), lambda x: _real(x, 3, 4), arity=3)
_add("cat", lambda layer, t, dim: torch.cat(t, dim), _any, dim=st.sampled_from([-1, 1]), arity=2)
_add("softmax", lambda layer, t: t[0].softmax(-1), _real)
_add(
    "mean", lambda layer, t, dim, keep: t[0].mean(dim, keep), lambda x: _real(x, 3),
    dim=st.sampled_from([-1, 1]), keep=_flag,
)  # fmt: skip
_add("max_pool", lambda layer, t: F.max_pool2d(t[0], 2), lambda x: _real(x, 4, 4))
_add("avg_pool", lambda layer, t: F.adaptive_avg_pool2d(t[0], 1), lambda x: _real(x, 4, 4))
_add("remainder", lambda layer, t: t[0] * 3 % 7, lambda x: x.dtype == torch.int64)

# Views, copies and layouts

_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(-1, -2),
    "swap_batch": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(0, *range(x.dim() - 1, 0, -1)),
    "flatten": lambda x: x.flatten(1),
    "rows": lambda x: x.reshape(-1, x.shape[-1]),
    "view": lambda x: x.view(x.shape[0], -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "select": lambda x: x[..., 0],
    "narrow": lambda x: x[..., 1:],
    "stride": lambda x: x[..., ::2],
    "head": lambda x: x[:, :2],
    "all": lambda x: x[:],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: torch.split(x, [1, x.shape[-1] - 1], -1)[0],
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, *[-1] * (x.dim() - 1)),
    "expand_ones": lambda x: x[:, :1].expand(x.shape),
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.view_as(x),
    "einsum": lambda x: torch.einsum("...ab->...ba", x),
    "type_as": lambda x: x.type_as(x),
    "unbind": lambda x: x.unbind(1)[0],
    "diagonal": lambda x: x.diagonal(dim1=-1, dim2=-2),
}
_COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "to_channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "repeat": lambda x: x.repeat(1, *[2] * (x.dim() - 1)),
    "pad": lambda x: F.pad(x, (1, 0)),
    "flip": lambda x: x.flip(-1),
}
_add("view", lambda layer, t, kind: _VIEWS[kind](t[0]), _any, kind=st.sampled_from(list(_VIEWS)))
_add("copy", lambda layer, t, kind: _COPIES[kind](t[0]), _any, kind=st.sampled_from(list(_COPIES)))


def cast(x: Tensor, dtype: str, exact: bool) -> Tensor:
    """``x.to(dtype)``; in the float64 twin of a model all floating-point values stay float64."""
    return x.to(torch.float64 if exact else DTYPES[dtype])


# Control flow that tracing has to settle

_BRANCHES: dict[str, Callable[[nn.Module, Tensor], bool]] = {
    "training": lambda module, x: module.training,
    "flag": lambda module, x: module.flag,
    "batch": lambda module, x: x.shape[0] > 3,
    "one": lambda module, x: x.shape[0] == 1,
    "even": lambda module, x: x.shape[-1] % 2 == 0,
    "size": lambda module, x: x.numel() > 100,
}


class Branch(nn.Module):
    """Doubles its input, or squares it, by a condition on modes, flags and shapes."""

    flag = True

    def __init__(self, condition: str):
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if _BRANCHES[self.condition](self, x) else x * x


_add("branch", _call, _any, condition=st.sampled_from(list(_BRANCHES)), layer=lambda t, condition: Branch(condition))
