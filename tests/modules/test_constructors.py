"""Constructors of fused modules: arguments in the order of torch's modules, and of a kind that belongs elsewhere."""

import inspect
import typing

import pytest
import torch
from torch import nn

from kfconvert import modules

REQUIRED = {"in_features": 4, "out_features": 3, "normalized_shape": 8, "d_model": 8, "nhead": 2, "scale": 1.0}
CASES = [
    pytest.param(cls, parameter, id=f"{name}-{parameter.name}")
    for name, cls in ((name, getattr(modules, name)) for name in modules.__all__)
    if issubclass(cls, nn.Module)
    for parameter in inspect.signature(cls).parameters.values()
    if {bool, int, float} & set(typing.get_args(parameter.annotation) or (parameter.annotation,))
]


def arguments(cls):
    """Valid ones of those that have no default, by name."""
    conv = nn.Conv2d(3, 3, 1)
    others = {"conv": conv, "bn": nn.BatchNorm2d(3), "norm": nn.GroupNorm(1, 3), "conv1": conv, "conv2": conv}
    others |= {"gate": nn.Linear(4, 4), "up": nn.Linear(4, 4), **REQUIRED}
    others |= {"in_proj": nn.Linear(4, 12), "out_proj": nn.Linear(4, 4), "heads": 2}
    parameters = inspect.signature(cls).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: others[p.name] for p in parameters if p.default is p.empty and p.kind not in several}


@pytest.mark.parametrize(("cls", "parameter"), CASES)
def test_kinds(cls, parameter):
    is_flag = parameter.annotation is bool
    for wrong in (1, 1e-5, "relu", None, torch.ones(1)) if is_flag else (True, "relu", torch.ones(2)):
        match = rf"^kfconvert::\w+: {parameter.name} must be .*, got \w+$"
        with pytest.raises(TypeError, match=match):
            cls(**{**arguments(cls), parameter.name: wrong})


@pytest.mark.parametrize(
    ("fused", "plain", "given"),
    [
        (modules.FusedLinear, nn.Linear, (8, 3, False)),
        (modules.FusedLinear, nn.Linear, (8, 3, True)),
        (modules.FusedLayerNorm, nn.LayerNorm, (8, 0.1, True, False)),
        (modules.FusedLayerNorm, nn.LayerNorm, ((8,), 0.1, False)),
        (modules.FusedRMSNorm, nn.RMSNorm, (8, 0.1, True)),
    ],
)
def test_in_the_order_of_torch(fused, plain, given):
    mine, theirs = fused(*given), plain(*given)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(mine(x), theirs(x))
