"""What a change of a model's state is, for the table and the fuzz of such changes, and the places they choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Undo = Callable[[], Any] | None
Targets = Callable[[nn.Module], Sequence[Any]]


def without_frames(error: Exception) -> Exception:
    """The exception alone, to be returned.

    A traceback holds the frames that hold it, with the graphs of autograd in their variables, until the cyclic
    collector runs; a parameter that a graph holds cannot be swapped (``torch.utils.swap_tensors``), so that whether
    a later change raises would be a matter of chance.
    """
    met: BaseException | None = error
    while met is not None:
        met.__traceback__ = None
        met = met.__cause__ or met.__context__
    return error


@dataclass
class Subject:
    """A model and how it is called: ``arguments(seed)`` are the positional arguments of a call.

    ``dtype``: what the floating-point arguments are brought to, where a change has moved the model.
    """

    model: nn.Module
    arguments: Callable[[int], tuple[Any, ...]]
    dtype: torch.dtype | None = None

    def inputs(self, seed: int = 0) -> tuple[Any, ...]:
        def cast(x: Any) -> Any:
            return x.to(self.dtype) if self.dtype and isinstance(x, Tensor) and x.is_floating_point() else x

        return pytree.tree_map(cast, self.arguments(seed))

    def call(self, seed: int = 0) -> Any:
        """The outputs without gradients, or the exception."""
        try:
            with torch.no_grad():
                return self.model(*self.inputs(seed))
        except Exception as error:  # what the original refuses, in whatever way, the converted one must refuse too
            return without_frames(error)

    def loss(self, seed: int = 0) -> Tensor:
        """A number that is linear in the outputs: its gradient does not depend on how those were rounded."""
        outputs = [x for x in pytree.tree_leaves(self.model(*self.inputs(seed))) if isinstance(x, Tensor)]
        weighted = [x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in outputs
                    if x.is_floating_point() and x.requires_grad]  # fmt: skip
        return torch.stack([x.sum() for x in weighted]).sum()

    def gradients(self, seed: int = 0) -> Any:
        """Those of all parameters, or the exception."""
        self.model.zero_grad(set_to_none=True)
        try:
            self.loss(seed).backward()
        except Exception as error:
            return without_frames(error)
        return [p.grad for p in self.model.parameters()]


@dataclass(frozen=True)
class Change:
    """``apply(subject, target)`` changes a model at one of ``targets(model)``; it may return what undoes that.

    Random numbers come from torch's default generator, which is seeded before.

    Attributes:
        hits: only weights change, so that the fused program goes on, with the new ones.
        returns: after ``undo`` the fused program is used again.
        visible: outputs differ afterwards.
        gradients: gradients are to be compared as well.
        announced: False for writes that only ``kfconvert_refresh`` or ``check_weights`` can find.
        process_wide: made once for all models.
        threads: may be made in another thread.
        cheap: quick enough for many models.
        special: there are places for it in the models of ``stateful_models`` only.
    """

    apply: Callable[[Subject, Any], Undo]
    targets: Targets
    hits: bool = False
    returns: bool = True
    visible: bool = True
    gradients: bool = False
    announced: bool = True
    process_wide: bool = False
    threads: bool = True
    cheap: bool = True
    special: bool = False


CHANGES: dict[str, Change] = {}


def change(targets: Targets, name: str | None = None, **options: bool) -> Callable[[Callable], Callable]:
    """Registers a function as a change, under its own name in words by default."""

    def register(function: Callable[[Subject, Any], Undo]) -> Callable[[Subject, Any], Undo]:
        key = name or function.__name__.strip("_").replace("_", " ")
        assert key not in CHANGES
        CHANGES[key] = Change(function, targets, **options)
        return function

    return register


weights = partial(change, hits=True)

# Targets


def anywhere(model: nn.Module) -> list[nn.Module]:
    return [model]


def of(*kinds: type[nn.Module]) -> Targets:
    return lambda model: [module for module in model.modules() if isinstance(module, kinds)]


def inner(model: nn.Module) -> list[nn.Module]:
    """Modules with a forward of their own within the model."""
    idle = (nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.Identity)
    return [module for module in model.modules() if module is not model and not isinstance(module, idle)]


def layers(model: nn.Module) -> list[nn.Module]:
    """Modules that are called with one tensor."""
    return of(nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GELU)(model)


def having(*names: str) -> Targets:
    """Modules that have all of these attributes, none of which is None."""
    return lambda model: [m for m in model.modules() if all(_value(m, name) is not None for name in names)]


def _value(module: nn.Module, name: str) -> Any:
    """None also where it cannot be computed, as by parametrizations that do not fit each other."""
    try:
        return getattr(module, name, None)
    except (TypeError, RuntimeError):
        return None


def untied(*names: str) -> Targets:
    """As :func:`having`, without modules that share a parameter with others."""
    return lambda model: [m for m in having(*names)(model) if not _shares(model, m)]


def _shares(model: nn.Module, module: nn.Module) -> bool:
    own = {id(p) for p in module.parameters(recurse=False)}
    return any(id(p) in own for other in model.modules() if other is not module
               for p in other.parameters(recurse=False))  # fmt: skip


def weighted(model: nn.Module) -> list[nn.Module]:
    """The model itself, where it has weights."""
    return [model] if any(p.is_floating_point() for p in model.parameters()) else []


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Parameters, those of the products first: what is folded, packed and merged."""
    found = [p for p in model.parameters() if p.is_floating_point()]
    return [p for p in found if p.dim() > 1] or found


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad and p.is_floating_point()]


# What many changes do


def noise(tensor: Tensor) -> Tensor:
    """A detached random tensor like ``tensor``, about as large as weights are."""
    return (0.5 * torch.randn(tensor.shape, dtype=torch.float32)).to(tensor.dtype)


def assigned(holder: Any, name: str, value: Any) -> Undo:
    """Assign an attribute, as users do."""
    missing = object()
    before = vars(holder).get(name, missing) if not isinstance(holder, nn.Module) else _of_module(holder, name, missing)
    setattr(holder, name, value)
    return lambda: delattr(holder, name) if before is missing else setattr(holder, name, before)


def _of_module(module: nn.Module, name: str, missing: Any) -> Any:
    stores = (module._parameters, module._buffers, module._modules, vars(module))
    return next((store[name] for store in stores if name in store), missing)


def scaled_outputs(outputs: Any) -> Any:
    """What a module gets or returns, with another first tensor, and in a dict other tensors altogether: no norm that
    follows takes that away."""
    if isinstance(outputs, Tensor):
        if not outputs.is_floating_point() or outputs.dim() == 0:
            return outputs.flip(-1) if outputs.dim() else outputs
        return outputs * 1.75 + torch.linspace(-0.5, 0.5, outputs.shape[-1]).to(outputs)
    if isinstance(outputs, dict):
        return type(outputs)({key: scaled_outputs(value) for key, value in outputs.items()})
    if type(outputs) in (tuple, list) and outputs:
        return type(outputs)((scaled_outputs(outputs[0]), *outputs[1:]))
    return outputs


def assigned_items(store: dict[Any, Any], key: Any, value: Any) -> Undo:
    """Put ``value`` into a dict."""
    missing = object()
    before = store.get(key, missing)
    store[key] = value
    return lambda: store.pop(key) if before is missing else store.__setitem__(key, before)
