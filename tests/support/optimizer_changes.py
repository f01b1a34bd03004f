"""Steps of optimizers, and ways of training of which a model gets no notice until later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kfconvert import ops

from .changes import Subject, inner, noise, trained, weighted, weights

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
# Some move the versions of weights, some do not. Large epsilons keep the step from being a sign, which rounding decides
# where a gradient is close to zero.
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD loop": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.1, eps=0.1, fused=True),
    "Adam foreach": partial(torch.optim.Adam, lr=0.1, eps=0.1, foreach=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=3.0, max_iter=2),
    "kfconvert fused_sgd": partial(ops.fused_sgd, lr=0.1),
    "kfconvert fused_adamw": partial(ops.fused_adamw, lr=0.1, eps=0.1),
}


def _randomise_gradients(parameters: list[nn.Parameter]) -> None:
    """Steps are compared to the bit; how gradients are rounded is no matter here."""
    for parameter in parameters:
        parameter.grad = noise(parameter)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _randomise_gradients(trained(module))
    optimizer.step(*([lambda: torch.zeros(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    optimizer.zero_grad()


def _steps(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Two steps with a call before each: only the optimizer tells the model of them."""
    optimizer = make(trained(model))
    for _ in range(2):
        _step(model, optimizer)
        subject.call()


def _evaluated_in_between(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Backward in train mode, a call in eval mode, then the step."""
    mode, optimizer = model.training, make(trained(model))
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
    mode, optimizer = model.training, make(trained(model))
    model.eval()
    for seed in range(2):
        optimizer.zero_grad()
        subject.loss(seed).backward()
        _randomise_gradients(trained(model))
        optimizer.step()
    model.train(mode)


def _trained_submodule(subject: Subject, module: nn.Module, make: Optimizer) -> None:
    """A part of the model is trained without it."""
    mode, optimizer = module.training, make(trained(module))
    module.train()
    _step(module, optimizer)
    module.train(mode)


def _trained_compiled(subject: Subject, model: nn.Module, make: Optimizer) -> None:
    """Training of the compiled model with a compiled step: neither runs the guarded forward's call."""
    torch._dynamo.reset()
    mode = model.training
    compiled = Subject(torch.compile(model, backend="eager"), subject.arguments, subject.dtype)
    compiled.model.train()
    optimizer = make(trained(model))
    compiled.loss().backward()
    _randomise_gradients(trained(model))
    torch.compile(lambda: optimizer.step(), backend="eager")()
    optimizer.zero_grad()
    model.train(mode)


for _name, _make in OPTIMIZERS.items():
    weights(weighted, f"{_name}: steps")(partial(_steps, make=_make))
for _name in ("SGD loop", "AdamW fused"):
    _make = OPTIMIZERS[_name]
    weights(weighted, f"{_name}: a call between backward and step", gradients=True)(
        partial(_evaluated_in_between, make=_make)
    )
    weights(weighted, f"{_name}: in eval mode")(partial(_fine_tuned, make=_make))
    weights(lambda model: [module for module in inner(model) if trained(module)], f"{_name}: of a submodule")(
        partial(_trained_submodule, make=_make)
    )
weights(weighted, "AdamW fused: under torch.compile", cheap=False, threads=False)(
    partial(_trained_compiled, make=OPTIMIZERS["AdamW fused"])
)
