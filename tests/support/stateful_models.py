"""Small models that keep state in every way that a module can, and read it in their forwards."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import small_models

# Read by the forwards below.
FACTOR = 1.5


def activated(x: Tensor) -> Tensor:
    return bent(x) + 0.1


def bent(x: Tensor) -> Tensor:
    return F.gelu(x)


class Shifted:
    """A class that a forward makes objects of."""

    amount = 0.25

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.amount


def scaled_by(number: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor, more: float = 1.0, *, less: float = 0.0) -> Tensor:
        return x * (number * more) - less

    return scaled


scaled = scaled_by(2.0)


class Attention(nn.Module):
    """Attention and a gated block without any batch norm: merged linears, norms with and without weights.
    (batch, 5, 16) -> (batch, 5, 16)"""

    def __init__(self):
        super().__init__()
        self.plain_norm = nn.LayerNorm(16, elementwise_affine=False)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain_norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm(x))
        return F.silu(self.gate(x)) * self.up(x) * self.gain


class Keeping(nn.Module):
    """Attributes of many kinds, all of which the forward reads."""

    level = 0.5

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.rand(16) + 0.5)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, 16))
        self.register_buffer("extra", None)
        self.scale, self.size, self.flag = 2.0, (1.0, 2.0), False
        self.activation = torch.relu
        self.tensor = torch.linspace(1, 2, 16)
        self.factors = [1.0, [0.5], torch.full((16,), 0.5)]
        self.table = {"gain": 1.5, "deep": {"shift": 0.25}, "vector": torch.full((16,), 0.75)}
        self.chosen = {"first"}
        self.settings = types.SimpleNamespace(scale=1.25, nested=types.SimpleNamespace(shift=0.5))

    def helper(self, x: Tensor) -> Tensor:
        return x * 1.25 + self.level

    @property
    def shift(self) -> float:
        return 0.125

    @staticmethod
    def fixed(x: Tensor) -> Tensor:
        return x - 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.linear(x)) * self.scale + self.shift
        y = y * self.gain * self.mask + self.tensor * self.size[0]
        y = y * self.factors[0] + self.factors[1][0] * self.factors[2]
        y = y * self.table["gain"] + self.table["deep"]["shift"] * self.table["vector"]
        if "second" in self.chosen or self.flag:
            y = y * 3
        if self.extra is not None:
            y = y + self.extra
        if len(self.factors) > 3:
            y = y - 2
        y = y * self.settings.scale + self.settings.nested.shift
        y = y + torch.full((16,), 0.5)  # in the default dtype
        return scaled(Shifted()(activated(self.fixed(self.helper(y))))) * FACTOR


class Stateful(nn.Module):
    """(batch, 5, 16) -> (batch, 5, 16)"""

    def __init__(self):
        super().__init__()
        self.inner = Keeping()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.tail[2].weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tail(x)


class Blocks(nn.Module):
    """No graph can be made of this model as a whole, but graphs of its blocks can. (batch, 5, 16) -> (batch, 5, 16)"""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e30:
                break
        return x


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention().eval()


def stateful() -> nn.Module:
    torch.manual_seed(0)
    return Stateful().eval()


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return Blocks().eval()


def spread(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model of ``make`` with weights so far apart that a change of any shows in the outputs."""

    def made() -> nn.Module:
        model = make()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in dict.fromkeys(model.parameters()):
                parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
        return model

    return made


_MAKERS = {"attention": attention, "stateful": stateful, "blocks": blocks, **small_models.MAKERS}
MAKERS = {name: spread(make) for name, make in _MAKERS.items()}


def arguments(model: nn.Module, seed: int = 0) -> tuple[Tensor, ...]:
    """Positional arguments for one of the models above."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, (Attention, Stateful, Blocks)):
        return (torch.randn(2, 5, 16, generator=generator),)
    return tuple(small_models.inputs_of(model, seed=seed).values())
