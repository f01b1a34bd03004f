"""Types and helpers that all sources of models share: request, result, errors and the fixed seed.

Functions import torch when they need it, because ``zoo.check`` runs without it.
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
    """Raised if no model exists for a name, size, dtype, device or set of weights. The message has one line."""


class WeightsUnavailable(ZooError):
    """Raised if trained weights do not exist or cannot be reached. ``weights="auto"`` then uses random weights."""


class WeightsWarning(UserWarning):
    """Warns that the model has random weights because trained ones are unavailable."""


class ZooModel(NamedTuple):
    """A model in eval mode, inputs that it accepts, and a recipe to rebuild its architecture.

    ``example_inputs`` is a tensor, a tuple of positional arguments or a dict of keyword arguments. ``recipe``
    contains only JSON values; ``recipe["weights"]`` is ``"pretrained"``, ``"random"`` or, for models from user
    code, ``"own"``.
    """

    model: nn.Module
    example_inputs: Any
    recipe: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The user's request. ``seq_len`` None: DEFAULT_SEQ_LEN, or the model's maximum if smaller. ``generates``: load a
    model with ``generate``. ``has_inputs``: the user has inputs, so no example inputs are needed."""

    weights: str = "auto"
    batch_size: int = 1
    seq_len: int | None = None
    generates: bool = False
    has_inputs: bool = False

    def images(self, channels: int, *size: int) -> torch.Tensor:
        """Returns standard normal images (or clips), float32 of shape (batch, channels, *size)."""
        import torch

        return torch.randn(self.batch_size, channels, *size, generator=generator(), device="cpu")


def generator() -> torch.Generator:
    """Returns a CPU generator with the fixed seed: equal names give equal inputs."""
    import torch

    return torch.Generator().manual_seed(SEED)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Context manager that fixes the seed of the global CPU generator and restores its state afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def socket_timeout() -> Iterator[None]:
    """Context manager that limits the timeout of new sockets to HUB_TIMEOUT_S, because torch.hub sets no timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(HUB_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def enliven(model: nn.Module) -> None:
    """Randomizes biases, norm scales and running statistics of a freshly initialized model.

    Fresh models have zero biases and identity norms, which would hide a dropped bias or a wrongly folded
    BatchNorm. Outputs of deep networks without trained statistics shrink to about 1e-10.
    """
    import torch

    noise = generator()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            mean, variance = module.running_mean, module.running_var
            if mean is not None and variance is not None:
                mean.copy_(0.1 * torch.randn(mean.shape, generator=noise, device="cpu"))
                variance.copy_(0.5 + torch.rand(variance.shape, generator=noise, device="cpu"))


_Model = TypeVar("_Model", bound="nn.Module")


def with_weights(
    name: str, request: Request, pretrained: Callable[[], _Model], random: Callable[[], _Model]
) -> tuple[_Model, str]:
    """Returns the model with the requested weights, and "pretrained" or "random".

    Raises:
        ZooError: pretrained weights are required but not available, or they cannot be read.
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
            f"{name}: RANDOM weights are used because {reason}; timings are valid, predictions are not",
            WeightsWarning,
            stacklevel=2,
        )
    return model, "random"


@contextlib.contextmanager
def building(library: Any, what: str) -> Iterator[None]:
    """Context manager that raises ZooError for any error of code of ``library``, which unexpected values may cause."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise ZooError(f"{library.__name__} {library.__version__} cannot {what}: {first_line(error)}") from error


def class_named(library: Any, name: str, base: type) -> type[Any] | None:
    """Returns the subclass ``name`` of ``base`` in ``library``; None if there is none."""
    try:
        found = getattr(library, name, None)
    except (ImportError, RuntimeError):  # a required package is not installed
        return None
    return found if isinstance(found, type) and issubclass(found, base) else None


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Returns ``" (nearest: a, b)"``, or "" if no name is similar."""
    found = difflib.get_close_matches(name, sorted(set(names)), n=count, cutoff=0.6)
    return f" (nearest: {', '.join(found)})" if found else ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
