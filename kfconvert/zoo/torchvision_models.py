"""Models of torchvision: names, weights and inputs of the training size."""

from __future__ import annotations

import contextlib
import io
import pickle
from functools import cache
from typing import Any
from urllib.error import URLError

import torchvision
from torch import nn
from torchvision import models

from .common import Request, WeightsUnavailable, ZooError, ZooModel, first_line, generator, socket_timeout, with_weights

CLIP_FRAMES = 16
SEGMENTATION_SIZE = 520
OPTICAL_FLOW_SIZE = 128

# torchvision's builders enable these with pretrained weights, so they are part of the architecture.
_KEYWORDS: dict[str, dict[str, Any]] = {
    "inception_v3": {"transform_input": True},
    "googlenet": {"transform_input": True, "aux_logits": False},
}


@cache
def _family(name: str) -> str:
    for family in ("detection", "segmentation", "video", "optical_flow", "quantization"):
        if name in models.list_models(module=getattr(models, family)):
            return family
    return "classification"


def knows(name: str) -> bool:
    """Whether torchvision has a model ``name``, convertible or not."""
    return name in models.list_models()


def build(name: str, request: Request) -> ZooModel:
    """Builds the torchvision model ``name``, its example inputs and its recipe."""
    if not knows(name):
        raise ZooError(f"torchvision has no model {name!r}")
    family = _family(name)
    if family == "detection":
        raise ZooError(
            f"{name} is a detection model, unsuited to random images: convert it from Python, with images of "
            "yours (example_inputs=([image],))"
        )
    if family == "quantization":
        raise ZooError(f"{name} is already quantized, so there is nothing to fuse")
    model, weights = with_weights(
        name, request, lambda: _pretrained(name), lambda: _random(name, _KEYWORDS.get(name, {}))
    )
    recipe = {
        "kind": "torchvision",
        "name": name,
        "weights": weights,
        "keywords": _architecture(name, model),
        "torchvision": torchvision.__version__,
    }
    return ZooModel(model, _inputs(name, family, model, request), recipe)


def rebuild(recipe: dict[str, Any]) -> nn.Module:
    """Builds the architecture of a recipe from ``build``, with random weights and without downloads."""
    name, keywords = recipe["name"], recipe["keywords"]
    if not knows(name) or _family(name) in ("detection", "quantization"):
        raise ZooError(f"torchvision has no model {name!r} that can be rebuilt")
    for keyword, value in keywords.items():  # from ``_architecture``; others might choose weights
        allowed = {"transform_input": True, "aux_logits": False, "aux_loss": True}
        if not (allowed.get(keyword) is value or (keyword == "image_size" and type(value) is int)):
            raise ZooError(f"its recipe of {name} has the keyword {keyword[:50]}, which is not allowed")
    try:
        return _random(name, keywords)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # unsuitable keywords
        raise ZooError(f"torchvision cannot build this {name}: {first_line(error)}") from error


def _pretrained(name: str) -> nn.Module:
    published = models.get_model_weights(name)
    if not list(published):
        raise WeightsUnavailable("torchvision publishes no weights for it")
    weights = published.DEFAULT
    try:
        with socket_timeout(), contextlib.redirect_stderr(io.StringIO()):  # torch.hub prints each download on stdout
            weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        return models.get_model(name, weights=weights)
    except (URLError, TimeoutError, ConnectionError) as error:
        reason = first_line(getattr(error, "reason", None) or error)
        raise WeightsUnavailable(f"torchvision's download server cannot be reached ({reason})") from error
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ZooError(f"{name}: the checkpoint cannot be read ({first_line(error)})") from error


def _random(name: str, keywords: dict[str, Any]) -> nn.Module:
    keywords = dict(keywords)
    if _family(name) == "segmentation":
        keywords["weights_backbone"] = None
    if name in _KEYWORDS:
        keywords["init_weights"] = True
    return models.get_model(name, weights=None, **keywords)


def _architecture(name: str, model: nn.Module) -> dict[str, Any]:
    """The keywords that rebuild the architecture of ``model``, in addition to the name."""
    keywords = dict(_KEYWORDS.get(name, {}))
    if isinstance(model, models.VisionTransformer):
        keywords["image_size"] = model.image_size
    if getattr(model, "aux_classifier", None) is not None:
        keywords["aux_loss"] = True
    return keywords


def _inputs(name: str, family: str, model: nn.Module, request: Request) -> Any:
    if family == "segmentation":
        return request.images(3, SEGMENTATION_SIZE, SEGMENTATION_SIZE)
    if family == "optical_flow":
        noise = generator()
        return tuple(request.images(3, OPTICAL_FLOW_SIZE, OPTICAL_FLOW_SIZE).normal_(generator=noise) for _ in range(2))
    size = _image_size(name, model)
    return request.images(3, CLIP_FRAMES, *size) if family == "video" else request.images(3, *size)


def _image_size(name: str, model: nn.Module) -> tuple[int, int]:
    """The (height, width) that the model requires, or else the crop size of its default weights."""
    if isinstance(model, models.VisionTransformer):
        return (model.image_size, model.image_size)
    published = models.get_model_weights(name)
    if not list(published):
        return (224, 224)
    crop = published.DEFAULT.transforms().crop_size
    return tuple(crop) if len(crop) == 2 else (crop[0], crop[0])
