"""Names -> models. One name resolves to a model, inputs that it accepts, and a recipe to rebuild it.

A name is looked up in this order; the first that knows it wins:

1. a prefix says where: ``torchvision:resnet50``, ``transformers:bert-base-uncased``, ``timm:resnet50``
2. a local folder with a Hugging Face ``config.json``; the model is of the class that the config names
3. ``package.module:function``, which returns ``(model, example_inputs)`` or a Hugging Face model
4. torchvision's names
5. the built-in Hugging Face architectures (``architectures.py``), as base models
6. timm's names, where timm is installed
7. any other name: a repository on the Hugging Face hub, as a base model (``AutoModel``)

So ``resnet50``, which torchvision and timm both have, is torchvision's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from ..json_values import first_fault
from . import hub, known
from .architectures import ALIASES, ARCHITECTURES
from .common import Request, WeightsWarning, ZooError, ZooModel, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "WeightsWarning",
    "ZooError",
    "ZooModel",
    "check",
    "described",
    "import_code",
    "list_models",
    "rebuild",
    "resolve",
]

WEIGHTS = ("auto", "pretrained", "random")
_LIBRARIES = ("torchvision", "timm")
_PREFIXES = (*_LIBRARIES, "transformers")


def resolve(
    name: str,
    weights: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    seq_len: int | None = None,
    generates: bool = False,
    has_inputs: bool = False,
) -> ZooModel:
    """The model called ``name`` in eval mode, with inputs for it, both in ``dtype`` (float32) on ``device``.

    Args:
        weights: ``"pretrained"`` demands trained weights; ``"random"`` takes random ones from a fixed seed;
            ``"auto"`` takes trained ones and, where they cannot be had, random ones with a WeightsWarning.
        batch_size: rows of the example inputs. A ``package.module:function`` that brings its own inputs
            is refused with another size than the usual one.
        seq_len: tokens of the example inputs of text models, at most the positions that the model has.
        generates: a Hugging Face model with the head by which it generates, instead of the base model.
        has_inputs: the caller has inputs for it: a ``package.module:function`` may return a model of any kind alone.

    Base models of decoders get ``config.use_cache = False``: a cache in the output is of use to ``generate`` alone.

    Raises:
        ZooError: unknown name, impossible size, weights that cannot be had or read, or a model that does not generate.
    """
    if weights not in WEIGHTS:
        raise ZooError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    for what, size in (("batch size", batch_size), ("sequence length", seq_len)):
        if size is not None and size < 1:
            raise ZooError(f"{what} must be at least 1, not {size}")
    check(name)
    import torch
    from torch.utils import _pytree as pytree

    dtype = torch.float32 if dtype is None else dtype
    model, inputs, recipe = _build(name, Request(weights, batch_size, seq_len, generates, has_inputs))
    if generates and not callable(getattr(model, "generate", None)):
        raise ZooError(f"{name} is a {type(model).__name__}, which does not generate")
    model = model.eval().to(device=device, dtype=dtype)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    return ZooModel(model, pytree.tree_map_only(torch.Tensor, place, inputs), recipe)


def rebuild(
    recipe: dict[str, Any], trust_source: bool = False, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> nn.Module:
    """The architecture that a recipe describes, its weights yet to be loaded. Downloads nothing.

    Args:
        trust_source: run the code that it names, and let its configuration choose files and networks.
        shapes: of the tensors that will be loaded; one that is for another model is refused before it takes memory, and
            parameters need not be filled.

    Raises:
        ZooError: the recipe reaches for what only ``trust_source`` allows, is damaged, or the library no longer has it.
    """
    kind = recipe.get("kind")
    if kind == "callable" and not trust_source:
        raise ZooError(
            f"its architecture is made by running {recipe.get('name')}: pass model=, or "
            "trust_source=True if you trust that code"
        )
    try:
        if kind in ("transformers", "folder", "diffusers"):
            from . import diffusers_models, huggingface

            checked = _Configured.model_validate(recipe).model_dump(by_alias=True)
            library: Any = diffusers_models if kind == "diffusers" else huggingface
            return library.rebuild(checked, trust_source, shapes)
        if kind == "torchvision":
            from .torchvision_models import rebuild as by_name
        elif kind == "timm":
            from .timm_models import rebuild as by_name
        elif kind == "callable":
            from .callables import rebuild as by_name
        else:
            raise ZooError(f"its recipe is of the unknown kind {kind!r}")
        return by_name(_Named.model_validate(recipe).model_dump())
    except ValidationError as error:
        raise ZooError(f"its recipe {first_fault(error)}") from error


class _Named(BaseModel, strict=True):
    """A recipe by the name of a library or of the user's own code."""

    name: str = Field(max_length=1000)
    keywords: dict[str, Any] = {}


class _Configured(BaseModel, strict=True):
    """A recipe by class and configuration of transformers or diffusers."""

    class_name: str = Field(alias="class", max_length=1000)
    config: dict[str, Any]
    generation: dict[str, Any] | None = None


def described(model: nn.Module) -> dict[str, Any] | None:
    """The recipe from which ``rebuild`` makes a model like this one, a model of transformers or diffusers of which the
    user has told none; None where there is no such recipe."""
    from . import diffusers_models, huggingface

    library: Any = huggingface if huggingface.is_one(model) else diffusers_models
    return library.described(model)


def check(name: str) -> None:
    """Raises ZooError where ``name`` is certainly none of a model, see ``resolve``.

    Neither torch nor a library of models is imported for that: a misspelt name is told at once.
    """
    prefix, _, rest = name.partition(":")
    if rest and prefix in _LIBRARIES:
        if known.installed(prefix) and not known.may_have(prefix, rest):
            raise ZooError(f"{prefix} has no model {rest!r}{nearest(rest, known.names())}")
        return
    on_hub = rest if rest and prefix in _PREFIXES else name
    if on_hub == name and (rest or _folder(name) or any(known.may_have(each, name) for each in _LIBRARIES)):
        return
    _check_hub(on_hub)


def import_code(name: str) -> None:
    """Import the module of a ``package.module:function``, so that the patterns that it registers are known; nothing for
    other names. What is wrong with it ``resolve`` tells."""
    prefix, _, rest = name.partition(":")
    if rest and prefix not in _PREFIXES:
        from .callables import find

        with contextlib.suppress(ZooError):
            find(name)


def list_models() -> dict[str, list[str]]:
    """The names known without a network, by source: ``torchvision``, ``transformers``, ``timm``. No library is imported
    for that."""
    return {
        "torchvision": known.names_of("torchvision"),
        "transformers": sorted(ARCHITECTURES),
        "timm": known.names_of("timm"),
    }


def _build(name: str, request: Request) -> ZooModel:
    from . import huggingface, timm_models, torchvision_models

    prefix, _, rest = name.partition(":")
    if rest and prefix in _PREFIXES:
        if prefix == "torchvision":
            return torchvision_models.build(rest, request)
        if prefix == "timm":
            return timm_models.build(rest, request)
        return huggingface.build(rest, request)
    folder = _folder(name)
    if folder:
        return huggingface.build_folder(folder, request)
    if rest:
        from . import callables

        return callables.build(name, request)
    if torchvision_models.knows(name):
        return torchvision_models.build(name, request)
    if not huggingface.knows(name) and timm_models.knows(name):
        return timm_models.build(name, request)
    _check_hub(name)
    return huggingface.build(name, request)


def _check_hub(name: str) -> None:
    reason = None if ALIASES.get(name, name) in ARCHITECTURES else hub.unknown(name)
    if reason:
        raise ZooError(f"unknown model {name!r}{nearest(name, known.names())}: {reason}")


def _folder(name: str) -> Path | None:
    """The local Hugging Face folder that ``name`` is the path of; None where it is no path."""
    expanded = os.path.expanduser(name)
    if not os.path.isdir(expanded):  # which no name is too long or too odd for
        if name.startswith((".", "/", "~")):
            there = os.path.exists(expanded)
            raise ZooError(f"{name} is a file, not a folder" if there else f"no such folder: {name}")
        return None
    folder = Path(expanded)
    if (folder / "kfconvert.json").exists():
        shown = "`kfconvert report` shows it"
        raise ZooError(f"{folder} is a converted model already: kfconvert.load({str(folder)!r}) gives it back, {shown}")
    if not (folder / "config.json").exists():
        raise ZooError(f"{folder} is no Hugging Face model folder: it has no config.json")
    return folder
