"""What peft does to a model with low-rank adapters: each a change that may follow any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from . import small_models, stateful_models
from .changes import Subject, Undo, change

TARGETS = ["query", "value", "up"]


def configuration(rank: int, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=rank, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)


def adapted(base: nn.Module) -> peft.PeftModel:
    """``base`` with two adapters of random weights; "first" is active."""
    torch.manual_seed(1)
    model = peft.get_peft_model(base, configuration(4), "first")
    model.add_adapter("second", configuration(2))
    return model.eval()


def plain() -> nn.Module:
    return stateful_models.MAKERS["attention"]()


@cache
def converted(adapted_before: bool) -> nn.Module:
    """Converted with the adapters, or before there were any."""
    base = adapted(plain()) if adapted_before else plain()
    fused = small_models.convert(base, example_inputs=stateful_models.arguments(plain()), validate_accuracy=False)
    return fused


def layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def every(method: str, *args: Any) -> Callable[[nn.Module], None]:
    """Call ``method`` of every adapted layer."""

    def change(model: nn.Module) -> None:
        for layer in layers(model):
            getattr(layer, method)(*args)

    return change


def inject(model: nn.Module) -> None:
    """Adapters of random weights at every linear layer of any model, in its own structure."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    if names:
        options = {"r": 2, "lora_alpha": 4, "init_lora_weights": False}
        torch.manual_seed(1)
        for title in ("first", "second"):
            peft.inject_adapter_in_model(peft.LoraConfig(**options, target_modules=names), model, title)


def _another(model: peft.PeftModel) -> None:
    torch.manual_seed(2)
    model.add_adapter("third", configuration(3))
    model.set_adapter("third")


def _new_weights(model: peft.PeftModel) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data * 1.5


def _trained(model: peft.PeftModel) -> None:
    """A step of a fused optimizer on what is trainable, in eval mode."""
    torch.manual_seed(3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(parameters, 0.05, eps=0.1, fused=True).step()


ADAPTER_CHANGES: dict[str, Callable[[peft.PeftModel], Any]] = {
    "merge safely": lambda model: model.merge_adapter(safe_merge=True),
    "merge": lambda model: model.merge_adapter(),
    "merge the second": lambda model: model.merge_adapter(["second"]),
    "unmerge": lambda model: model.unmerge_adapter(),
    "set scale": every("set_scale", "first", 3.0),
    "scale layer": every("scale_layer", 2.0),
    "unscale layer": every("unscale_layer", 2.0),
    "unscale layers": every("unscale_layer"),
    "use the first": lambda model: model.set_adapter("first"),
    "use the second": lambda model: model.set_adapter("second"),
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "enable": lambda model: model.base_model.enable_adapter_layers(),
    "delete the second": lambda model: model.delete_adapter("second"),
    "add another": _another,
    "both at once": lambda model: model.base_model.set_adapter(["first", "second"]),
    "add weighted": lambda model: model.add_weighted_adapter(["first", "second"], [0.5, 0.5], "sum", "svd"),
    "other weights": _new_weights,
    "train": _trained,
}


@change(lambda model: [model] if any(type(m) is nn.Linear for m in model.modules()) else [], "adapter: new ones")
def _injected(subject: Subject, model: nn.Module) -> Undo:
    inject(model)
