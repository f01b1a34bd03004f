"""Writes to weights, announced and not, and other weights in their places: the fused program goes on with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from .changes import Subject, Undo, assigned, change, having, matrices, noise, of, trained, untied, weighted, weights

# Announced writes


def _other_state(model: nn.Module) -> dict[str, Tensor]:
    """A state dict with other weights and statistics."""
    state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    with torch.no_grad():
        for name, value in state.items():
            if value.is_floating_point():
                value.abs_().add_(1.0) if "var" in name else value.add_(noise(value))
    return state


@weights(weighted)
def load_state_dict(subject: Subject, model: nn.Module) -> Undo:
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(_other_state(model), strict=False)
    return lambda: model.load_state_dict(before)


@weights(lambda model: [model] if set(untied()(model)) == set(model.modules()) else [], returns=False)
def load_state_dict_that_assigns(subject: Subject, model: nn.Module) -> Undo:
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict(_other_state(model), strict=False, assign=True)
    return lambda: model.load_state_dict(before, assign=True)


def _initialised(subject: Subject, parameter: nn.Parameter, function: Callable[[Tensor], Any]) -> Undo:
    before = parameter.detach().clone()
    function(parameter)
    return lambda: torch.no_grad()(parameter.copy_)(before)


_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "nn.init.normal_": nn.init.normal_,
    "torch.no_grad": lambda p: torch.no_grad()(p.mul_)(-2),
    "inference mode": lambda p: torch.inference_mode()(p.mul_)(-2),
    "detach": lambda p: p.detach().mul_(-2),
    "foreach": lambda p: torch.no_grad()(torch._foreach_mul_)([p], -2),
    "out=": lambda p: torch.no_grad()(torch.mul)(p.detach(), -2, out=p.detach()),
    "new data": lambda p: setattr(p, "data", noise(p)),
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(noise(p), p.requires_grad)),
    "set_": lambda p: torch.no_grad()(p.set_)(noise(p)),
}
for _name, _write in _WRITES.items():
    weights(matrices, f"write: {_name}")(partial(_initialised, function=_write))


@weights(weighted)
def vector_to_parameters(subject: Subject, model: nn.Module) -> Undo:
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(before + 0.5 * torch.randn(before.shape).to(before), model.parameters())
    return lambda: nn.utils.vector_to_parameters(before, model.parameters())


@weights(weighted)
def data_between_train_and_eval(subject: Subject, model: nn.Module) -> Undo:
    """Written through ``.data`` in train mode, with no call there."""
    mode = model.training
    model.train()
    for parameter in trained(model):
        parameter.data.mul_(1.5)
    model.train(mode) if mode else model.eval()
    return None


@weights(having("running_var"))
def statistics(subject: Subject, norm: nn.Module) -> Undo:
    norm.running_var.add_(2.0)
    return lambda: norm.running_var.sub_(2.0)


@weights(lambda model: [model] if of(nn.modules.batchnorm._BatchNorm)(model) else [])
def update_batch_norms(subject: Subject, model: nn.Module) -> Undo:
    update_bn([subject.inputs(seed)[0] for seed in (1, 2)], model)


@weights(weighted, visible=False, gradients=True)
def frozen(subject: Subject, model: nn.Module) -> Undo:
    model.requires_grad_(False)
    return lambda: model.requires_grad_(True)


# Other dtypes, and back


def _moved(subject: Subject, dtype: torch.dtype, *, swap: bool = False) -> Undo:
    parameters = [p for p in subject.model.parameters() if p.is_floating_point()]
    before = parameters[0].dtype if parameters else torch.float32

    def move(to: torch.dtype) -> None:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            subject.model.to(to)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        subject.dtype = to

    move(dtype)
    return lambda: move(before)


for _dtype, _swap in ((torch.float64, False), (torch.float16, True), (torch.bfloat16, False)):
    change(weighted, f"moved to {_dtype}" + (" by swapping" if _swap else ""), threads=not _swap, visible=False)(
        lambda subject, model, dtype=_dtype, swap=_swap: _moved(subject, dtype, swap=swap)
    )


@weights(weighted)
def half_and_back(subject: Subject, model: nn.Module) -> Undo:
    """Rounded weights at the places of the old, each in memory of its own, then doubled in place."""
    _moved(subject, torch.float16)()
    subject.dtype = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


# Unannounced writes: what writes to memory that others lent


def _unannounced(subject: Subject, parameter: nn.Parameter, function: Callable[[nn.Parameter], Any]) -> Undo:
    before = parameter.detach().clone()
    function(parameter)
    return lambda: parameter.data.copy_(before)


_UNANNOUNCED: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(-2),
    "storage": lambda p: p.untyped_storage().copy_(noise(p).contiguous().untyped_storage()),
    "numpy": lambda p: p.detach().numpy().__imul__(-2),
    "dlpack": lambda p: torch.from_dlpack(torch.to_dlpack(p.detach())).mul_(-2),
}


def _whole(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that numpy takes, each of which has its memory to itself."""
    return [p for p in matrices(model) if p.dtype in (torch.float32, torch.float64)
            and p.untyped_storage().nbytes() == p.numel() * p.itemsize and p.is_contiguous()]  # fmt: skip


for _name, _write in _UNANNOUNCED.items():
    weights(_whole, f"unannounced: {_name}", announced=False)(partial(_unannounced, function=_write))


# Other tensors in the same places


@weights(untied("weight"))
def new_parameter(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "weight", nn.Parameter(noise(module.weight)))


@weights(having("running_mean"))
def new_buffer(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "running_mean", noise(module.running_mean))


@weights(untied("bias"))
def entry_of_the_dict_of_parameters(subject: Subject, module: nn.Module) -> Undo:
    before = module._parameters["bias"]
    module._parameters["bias"] = nn.Parameter(noise(module.bias))
    return lambda: module._parameters.update(bias=before)
