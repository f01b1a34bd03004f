"""Resolves a name to a model, inputs that it accepts, and a recipe to rebuild it.

Names resolve in this order, and the first match is used:

1. a prefix names the library: ``torchvision:resnet50``, ``transformers:bert-base-uncased``, ``timm:resnet50``
2. a local folder with a Hugging Face ``config.json``, which names the model class
3. ``package.module:function``, which returns ``(model, example_inputs)`` or a Hugging Face model
4. torchvision's names
5. the built-in Hugging Face architectures (``architectures.py``), as base models
6. timm's names, if timm is installed
7. any other name: a repository on the Hugging Face hub, as a base model (``AutoModel``)

So ``resnet50``, a name in both torchvision and timm, resolves to torchvision.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, ValidationError

from ..json_values import first_fault
from . import hub, registry
from .architectures import ARCHITECTURES, built_in
from .common import Request, WeightsWarning, ZooError, ZooModel, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

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
    """Returns the model ``name`` in eval mode and its example inputs, in ``dtype`` (default float32) on ``device``.

    Args:
        weights: ``"pretrained"`` requires trained weights; ``"random"`` uses random weights from a fixed seed;
            ``"auto"`` uses trained weights or, if they are unavailable, random ones with a WeightsWarning.
        batch_size: rows of the example inputs. For a ``package.module:function`` that returns inputs, any other
            value than the default is an error.
        seq_len: tokens of the example inputs of text models, at most the model's number of positions.
        generates: load a Hugging Face model with its generation head instead of the base model.
        has_inputs: the caller has inputs, so a ``package.module:function`` may return any model without inputs.

    Base models of decoders get ``config.use_cache = False``, because only ``generate`` uses a cache in the output.

    Raises:
        ZooError: unknown name, impossible size, unavailable or unreadable weights, or a model that does not generate.
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


def rebuild(recipe: dict[str, Any], trust_source: bool = False) -> nn.Module:
    """Builds the architecture that a recipe describes, without loading weights: parameters may be uninitialized.
    Downloads nothing.

    Args:
        trust_source: run the code that the recipe names, and let its configuration choose files and networks.

    Raises:
        ZooError: the recipe is damaged, needs ``trust_source``, or names a model that the library no longer has.
    """
    kind = recipe.get("kind")
    if kind == "callable" and not trust_source:
        raise ZooError(
            f"building its architecture runs {recipe.get('name')}: pass model=, or "
            "trust_source=True if you trust that code"
        )
    try:
        if kind in ("transformers", "folder", "diffusers"):
            from . import diffusers_models, huggingface

            checked = _Configured.model_validate(recipe).model_dump(by_alias=True)
            library: Any = diffusers_models if kind == "diffusers" else huggingface
            return library.rebuild(checked, trust_source)
        if kind == "torchvision":
            from .torchvision_models import rebuild as by_name
        elif kind == "timm":
            from .timm_models import rebuild as by_name
        elif kind == "callable":
            from .callables import rebuild as by_name
        else:
            raise ZooError(f"its recipe has the unknown kind {kind!r}")
        return by_name(_Named.model_validate(recipe).model_dump())
    except ValidationError as error:
        raise ZooError(f"its recipe {first_fault(error)}") from error


class _Named(BaseModel, strict=True):
    """A recipe with the name of a library model or of the user's function."""

    name: str = Field(max_length=1000)
    keywords: dict[str, Any] = {}


class _Configured(BaseModel, strict=True):
    """A recipe with a class and configuration of transformers or diffusers."""

    class_name: str = Field(alias="class", max_length=1000)
    config: dict[str, Any]
    generation: dict[str, Any] | None = None
    tuples: list[list[str | int]] = []


def described(model: nn.Module) -> dict[str, Any] | None:
    """Returns a recipe from which ``rebuild`` builds this transformers or diffusers model, for models without a recipe
    from the user; None if there is none."""
    from . import diffusers_models, huggingface

    library: Any = huggingface if huggingface.is_one(model) else diffusers_models
    return library.described(model)


def check(name: str) -> None:
    """Raises ZooError if ``name`` certainly names no model, see ``resolve``.

    The check imports neither torch nor a model library, so a misspelt name is reported immediately.
    """
    prefix, _, rest = name.partition(":")
    if rest and prefix in _LIBRARIES:
        if registry.installed(prefix) and not registry.may_have(prefix, rest):
            raise ZooError(f"{prefix} has no model {rest!r}{nearest(rest, registry.names())}")
        return
    on_hub = rest if rest and prefix in _PREFIXES else name
    if on_hub == name and (rest or _folder(name) or any(registry.may_have(each, name) for each in _LIBRARIES)):
        return
    _check_hub(on_hub)


def import_code(name: str) -> None:
    """Imports the module of a ``package.module:function``, which may register patterns, and ignores other names and all
    errors: ``resolve`` reports them."""
    prefix, _, rest = name.partition(":")
    if rest and prefix not in _PREFIXES:
        from .callables import find

        with contextlib.suppress(ZooError):
            find(name)


def list_models() -> dict[str, list[str]]:
    """Returns the names known without a network, by source: ``torchvision``, ``transformers``, ``timm``. Imports no
    library."""
    return {
        "torchvision": registry.names_of("torchvision"),
        "transformers": sorted(ARCHITECTURES),
        "timm": registry.names_of("timm"),
    }


def _build(name: str, request: Request) -> ZooModel:
    from . import huggingface, timm_models, torchvision_models

    prefix, _, rest = name.partition(":")
    libraries = {"torchvision": torchvision_models, "timm": timm_models, "transformers": huggingface}
    if rest and prefix in libraries:
        return libraries[prefix].build(rest, request)
    folder = _folder(name)
    if folder:
        return huggingface.build_folder(folder, request)
    if rest:
        from . import callables

        return callables.build(name, request)
    if torchvision_models.knows(name):
        return torchvision_models.build(name, request)
    if built_in(name) is None and timm_models.knows(name):
        return timm_models.build(name, request)
    _check_hub(name)
    return huggingface.build(name, request)


def _check_hub(name: str) -> None:
    reason = None if built_in(name) else hub.unknown(name)
    if reason:
        raise ZooError(f"unknown model {name!r}{nearest(name, registry.names())}: {reason}")


def _folder(name: str) -> Path | None:
    """The local Hugging Face folder at the path ``name``; None if ``name`` is not a path."""
    expanded = os.path.expanduser(name)
    if not os.path.isdir(expanded):  # never raises, even for overlong names
        if name.startswith((".", "/", "~")):
            there = os.path.exists(expanded)
            raise ZooError(f"{name} is a file, not a folder" if there else f"no such folder: {name}")
        return None
    folder = Path(expanded)
    if (folder / "kfconvert.json").exists():
        shown = "`kfconvert report` shows it"
        raise ZooError(f"{folder} is already a converted model: kfconvert.load({str(folder)!r}) loads it, {shown}")
    if not (folder / "config.json").exists():
        raise ZooError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return folder
