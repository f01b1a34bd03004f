"""Steps of optimizers, each with the ways of training that a model can be told of too late."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfconvert import ops

from .changes import Subject, inner, noise, trained, weighted, weights

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
# Large epsilons keep the step from being a sign, which rounding decides where a gradient is next to zero.
_OPTIONS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 5.0, "eps": 0.1},
    "Adafactor": {"lr": 0.3},
    "RAdam": {"lr": 0.3, "eps": 0.1},
    "Rprop": {"lr": 0.1},
    "LBFGS": {"lr": 3.0, "max_iter": 2},
    "SGD": {"lr": 0.1, "momentum": 0.9},
}


def _optimizers() -> dict[str, Optimizer]:
    """Every optimizer of torch for dense gradients, in each of its implementations, and this package's."""
    found: dict[str, Optimizer] = {}
    for name, kind in vars(torch.optim).items():
        if not inspect.isclass(kind) or name in ("Optimizer", "SparseAdam"):
            continue
        parameters = inspect.signature(kind).parameters
        options = _OPTIONS.get(name) or {"lr": 0.1, **({"eps": 0.1} if "eps" in parameters else {})}
        found[f"{name} loop"] = partial(kind, **options, **({"foreach": False} if "foreach" in parameters else {}))
        for way in ("foreach", "fused"):
            if way in parameters:
                found[f"{name} {way}"] = partial(kind, **options, **{way: True})
    found["kfconvert fused_adamw"] = partial(ops.fused_adamw, lr=0.1, eps=0.1)
    found["kfconvert fused_sgd"] = partial(ops.fused_sgd, lr=0.1)
    return found


OPTIMIZERS = _optimizers()
# A few optimizers stand for all where the way of training matters: some move the versions of weights, some do not.
TYPICAL = ("SGD loop", "AdamW fused", "Adam foreach", "kfconvert fused_sgd")


def _randomise_gradients(parameters: list[nn.Parameter]) -> None:
    """Steps are compared to the bit; how gradients are rounded is no matter here."""
    for parameter in parameters:
        parameter.grad = noise(parameter)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _randomise_gradients(trained(module))
    optimizer.step(*([lambda: torch.zeros(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    optimizer.zero_grad()


def _made(module: nn.Module, make: Optimizer) -> torch.optim.Optimizer:
    """The optimizer for ``module``; Muon is for matrices only."""
    parameters = trained(module)
    if make.func is torch.optim.Muon:
        parameters = [p for p in parameters if p.dim() == 2]
    return make(parameters)


def _steps(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Two steps with a call before each: only the optimizer tells the model of them."""
    optimizer = _made(model, make)
    for _ in range(2):
        _step(model, optimizer)
        subject.call()


def _evaluated_in_between(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Backward in train mode, a call in eval mode, then the step."""
    mode, optimizer = model.training, _made(model, make)
    model.train()
    subject.loss().backward()
    _randomise_gradients(trained(model))
    model.eval()
    subject.call()
    optimizer.step()
    optimizer.zero_grad()
    model.train(mode)


def _fine_tuned(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Training in eval mode, as with frozen batch norms."""
    mode, optimizer = model.training, _made(model, make)
    model.eval()
    for seed in range(2):
        optimizer.zero_grad()
        subject.loss(seed).backward()
        _randomise_gradients(trained(model))
        optimizer.step()
    model.train(mode)


def _trained_submodule(subject: Subject, module: nn.Module, make: Optimizer) -> None:
    """A part of the model is trained without it."""
    mode, optimizer = module.training, _made(module, make)
    module.train()
    _step(module, optimizer)
    module.train(mode)


def _trained_compiled(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Training of the compiled model, which never sees the guarded forward's own call."""
    torch._dynamo.reset()
    mode = model.training
    compiled = Subject(torch.compile(model, backend="eager"), subject.arguments, subject.dtype)
    compiled.model.train()
    optimizer = _made(model, make)
    compiled.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.train(mode)


def _compiled_step(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """The optimizer's step itself is compiled."""
    torch._dynamo.reset()
    optimizer = _made(model, make)
    _randomise_gradients(trained(model))
    torch.compile(lambda: optimizer.step(), backend="eager")()
    optimizer.zero_grad()


def _trainable_inner(model: nn.Module) -> list[nn.Module]:
    return [module for module in inner(model) if trained(module)]


for _name, _make in OPTIMIZERS.items():
    weights(weighted, f"{_name}: steps")(partial(_steps, make=_make))
for _name in TYPICAL:
    _make = OPTIMIZERS[_name]
    weights(weighted, f"{_name}: a call between backward and step", gradients=True)(
        partial(_evaluated_in_between, make=_make)
    )
    weights(weighted, f"{_name}: in eval mode")(partial(_fine_tuned, make=_make))
    weights(_trainable_inner, f"{_name}: of a submodule")(partial(_trained_submodule, make=_make))
for _name in ("AdamW fused", "SGD loop"):
    _make = OPTIMIZERS[_name]
    weights(weighted, f"{_name}: under torch.compile", cheap=False, threads=False)(
        partial(_trained_compiled, make=_make)
    )
    weights(weighted, f"{_name}: step under torch.compile", cheap=False, threads=False)(
        partial(_compiled_step, make=_make)
    )
