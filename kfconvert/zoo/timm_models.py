"""Models of timm (optional)."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from torch import nn

from . import hub
from .common import Request, WeightsUnavailable, ZooError, ZooModel, first_line, socket_timeout, with_weights


def installed() -> bool:
    return importlib.util.find_spec("timm") is not None


def knows(name: str) -> bool:
    """Whether timm is installed and has a model ``name``. Paths and repositories do not count."""
    if not installed() or not re.fullmatch(r"\w+(\.\w+)*", name):
        return False
    import timm

    return timm.is_model(name)


def build(name: str, request: Request) -> ZooModel:
    """Builds the timm model ``name``, an image batch of the size in its default configuration, and its recipe."""
    if not installed():
        raise ZooError(f"timm:{name} needs the package timm: pip install timm")
    if not knows(name):
        raise ZooError(f"timm has no model {name!r}")
    import timm

    model, weights = with_weights(
        f"timm:{name}", request, lambda: _pretrained(name), lambda: timm.create_model(name, pretrained=False)
    )
    config: Any = model.default_cfg
    channels, height, width = config["input_size"]
    recipe = {"kind": "timm", "name": name, "weights": weights, "timm": timm.__version__}
    return ZooModel(model, request.images(channels, height, width), recipe)


def rebuild(recipe: dict[str, Any]) -> nn.Module:
    """Builds the architecture of a recipe from ``build``, with random weights and without downloads."""
    name = recipe["name"]
    if not knows(name):
        raise ZooError(f"timm:{name} cannot be rebuilt: timm is not installed or does not have it")
    import timm

    try:
        return timm.create_model(name, pretrained=False)
    except (RuntimeError, ValueError) as error:  # unknown tag
        raise ZooError(f"timm:{name} cannot be rebuilt: {first_line(error)}") from error


def _pretrained(name: str) -> nn.Module:
    import timm

    published = timm.get_pretrained_cfg(name)
    if published is None or not (published.hf_hub_id or published.url):
        raise WeightsUnavailable("timm publishes no weights for it")
    if published.hf_hub_id and not hub.cached(published.hf_hub_id, "model.safetensors"):
        try:
            hub.exists(published.hf_hub_id, "config.json")
        except hub.HubUnreachable as error:
            raise WeightsUnavailable(f"the Hugging Face hub cannot be reached ({error})") from error
    try:
        with socket_timeout():
            return timm.create_model(name, pretrained=True)
    except Exception as error:  # any error of timm, torch.hub or the hub's client
        raise ZooError(f"timm:{name}: the checkpoint cannot be read ({first_line(error)})") from error
