"""What every source of models shares: the request, the answer, the errors and the fixed seed.

torch is imported where it is used: a misspelt name is told without it (``zoo.check``).
"""

from __future__ import annotations

import contextlib
import difflib
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

SEED = 0
HUB_TIMEOUT_S = 5.0
DEFAULT_SEQ_LEN = 128


class ZooError(ValueError):
    """A name, size, dtype, device or set of weights for which there is no model. One clear line."""


class WeightsUnavailable(ZooError):
    """Trained weights exist nowhere or cannot be reached: a reason for random ones where those will do."""


class WeightsWarning(UserWarning):
    """The model has random weights although trained ones were welcome."""


class ZooModel(NamedTuple):
    """A model in eval mode, inputs it accepts, and the recipe from which its architecture can be rebuilt.

    ``example_inputs`` is a tensor, a tuple of positional arguments or a dict of keyword arguments. ``recipe``
    is made of JSON values only; ``recipe["weights"]`` is ``"pretrained"``, ``"random"`` or, where the maker
    of the model decided, ``"own"``.
    """

    model: nn.Module
    example_inputs: Any
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the user asked for. ``seq_len`` None: DEFAULT_SEQ_LEN, or less where the model has less. ``generates``: a
    model that has ``generate``. ``has_inputs``: the user has inputs for it, and needs none."""

    weights: str = "auto"
    batch_size: int = 1
    seq_len: int | None = None
    generates: bool = False
    has_inputs: bool = False

    def images(self, channels: int, *size: int) -> torch.Tensor:
        """Standard normal images (or clips), float32 of shape (batch, channels, *size)."""
        import torch

        return torch.randn(self.batch_size, channels, *size, generator=generator())


def generator() -> torch.Generator:
    """A CPU generator with the fixed seed: the same name always gives the same inputs."""
    import torch

    return torch.Generator().manual_seed(SEED)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Fixes the seed of the global CPU generator inside and gives the caller's state back afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def socket_timeout() -> Iterator[None]:
    """Limits the wait for new sockets to HUB_TIMEOUT_S: torch.hub downloads without any limit of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(HUB_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def enliven(model: nn.Module) -> None:
    """Gives biases, norm scales and running statistics of a freshly initialised model values of their own.

    Fresh models have zero biases and identity norms: a conversion that dropped a bias or folded a BatchNorm
    wrongly would go unseen, and deep networks without trained statistics fade to outputs around 1e-10.
    """
    import torch

    noise = generator()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            mean, variance = module.running_mean, module.running_var
            if mean is not None and variance is not None:
                mean.copy_(0.1 * torch.randn(mean.shape, generator=noise))
                variance.copy_(0.5 + torch.rand(variance.shape, generator=noise))


_Model = TypeVar("_Model", bound="nn.Module")


def with_weights(
    name: str, request: Request, pretrained: Callable[[], _Model], random: Callable[[], _Model]
) -> tuple[_Model, str]:
    """The model with the weights that ``request`` asks for, and which those are: "pretrained" or "random".

    Raises:
        ZooError: pretrained weights were demanded and are not available, or are there and cannot be read.
    """
    reason = None
    if request.weights != "random":
        try:
            return pretrained(), "pretrained"
        except WeightsUnavailable as error:
            if request.weights == "pretrained":
                raise ZooError(f"{name}: no pretrained weights: {error}") from error
            reason = error
    with seeded():
        model = random()
    enliven(model)
    if reason:
        warnings.warn(
            f"{name}: RANDOM weights are used because {reason}; "
            "timings are those of the real model, predictions are not",
            WeightsWarning,
            stacklevel=2,
        )
    return model, "random"


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """``" (nearest: a, b)"``, or the empty string where nothing is near."""
    found = difflib.get_close_matches(name, sorted(set(names)), n=count, cutoff=0.6)
    return f" (nearest: {', '.join(found)})" if found else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
