"""Hooks that a fused program would not call."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .output_recording import is_recording_hook

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOK_KINDS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
# The function that removes a hook of a class, and the attribute of the hook with the name of the weight.
_REMOVAL = {
    WeightNorm: ("remove_weight_norm", "name"),
    SpectralNorm: ("remove_spectral_norm", "name"),
    BasePruningMethod: ("prune.remove", "_tensor_name"),
}
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{kind}") for kind in HOOK_KINDS)


def inner_hook(model: nn.Module, of_gradients: bool = False) -> str | None:
    """The reason why a program of ``model`` would skip hooks of its submodules, around their forwards or
    ``of_gradients``; None where there are none."""
    for name, module in model.named_modules():
        if module is not model and (_has_backward_hooks if of_gradients else has_hooks)(module):
            return f"{name} has hooks, which a fused program would not call{remedy(module)}"
    return None


def remedy(module: nn.Module) -> str:
    """The end of a reason that says how to remove the hooks by which torch recomputes a weight of ``module``; "" where
    it has none."""
    for hook in module._forward_pre_hooks.values():
        for kind, (function, attribute) in _REMOVAL.items():
            if isinstance(hook, kind):
                call = f'torch.nn.utils.{function}(module, "{getattr(hook, attribute)}")'
                return f"; {call} removes them and keeps the weight"
    return ""


def global_hook() -> str | None:
    """The reason why a program would skip global module hooks; None where there are none."""
    return "global module hooks are registered, which a fused program would not call" if any(_GLOBAL_HOOKS) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether ``module`` itself has hooks that its ``__call__`` runs around its forward."""
    kinds = (module._forward_hooks, module._forward_pre_hooks)
    # Hooks that transformers leaves in place are checked separately, see recorded_outputs.
    return any(not is_recording_hook(hook) for kind in kinds for hook in kind.values())


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)
