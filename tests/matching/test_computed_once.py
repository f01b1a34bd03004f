"""What depends on weights alone is computed once after each change of the weights."""

import copy

import pytest
import torch
from support.devices import DEVICES
from torch import nn
from torch.nn import functional as F

from kfconvert import auto_convert_model
from kfconvert.capture.captured import capture
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching import computed_once


class Model(nn.Module):
    """``function(model, x)`` with a weight (4, 4) and a table (9, 2)."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(9, 2))
        self.linear = nn.Linear(2, 4)

    def forward(self, x):
        return self.function(self, x)


def with_changed_rows(self, x):
    bias = self.weight[0].clone()
    bias[1:3].zero_()
    return F.linear(x, self.weight, bias)


def with_mask(self, x):
    mask = x.new_zeros((4, 4))
    mask[1:, :2] = 3
    return x @ (mask.unsqueeze(0) - mask.unsqueeze(1)).masked_fill(mask != 0, -7.0).sum(0)


HELD = {
    "normalized weight": lambda self, x: x @ (self.weight / self.weight.norm(dim=1, keepdim=True)),
    "positions": lambda self, x: x + self.linear(self.table[torch.arange(4, device=x.device) * 2]).relu(),
    "rows set to zero": with_changed_rows,
    "mask": with_mask,
    "several": lambda self, x: x * self.weight.exp().unbind()[2] + self.weight.t().exp()[0] + x.new_full((4,), 2.0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HELD)
def test_values_of_weights_follow_the_weights(name, device):
    model, x = Model(HELD[name]).to(device).eval(), torch.randn(4, 4, device=device)
    program = capture(model, "", ExampleCall((x,)), [{}]).variant(()).program
    assert computed_once.NAME in program.modules
    steps = [
        lambda: None,
        lambda: model.weight.mul_(2),
        lambda: model.linear.bias.add_(1),
        lambda: setattr(model, "weight", nn.Parameter(torch.randn(4, 4, device=device))),
        lambda: setattr(model, "table", torch.randn(9, 2, device=device)),
        lambda: model.load_state_dict({key: -value for key, value in model.state_dict().items()}),
    ]
    with torch.no_grad():
        for step in steps:
            step()
            for y in (x, x + 1):
                torch.testing.assert_close(program.run([y])[0], model(y), rtol=1e-5, atol=1e-5)


def write_an_input(self, x):
    values = x.new_zeros(4)
    values[1] = x[0, 0]
    return x + values


KEPT = {
    "returned": lambda self, x: (x + 1, self.weight.exp()),
    "view returned": lambda self, x: (x + 1, self.weight.exp().t()),
    "written": write_an_input,
    "random": lambda self, x: x + torch.rand_like(self.weight),
    "views of weights": lambda self, x: x @ self.weight.t(),
    "large": lambda self, x: x + torch.arange(2**22, device=x.device).square().sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_values_are_computed_in_each_call(name):
    model, x = Model(KEPT[name]).eval(), torch.randn(4, 4)
    program = capture(model, "", ExampleCall((x,)), [{}]).variant(()).program
    assert computed_once.NAME not in program.modules
    with torch.no_grad():
        for y in (x, x + 1, x):
            with torch.random.fork_rng():
                found = program.run([y])
            torch.testing.assert_close(found if len(found) > 1 else found[0], model(y))
            found[-1].zero_()


@pytest.mark.parametrize("device", DEVICES)
def test_converted_models_train_and_copy(device):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.GELU(), nn.Linear(4, 4)).to(device)
    x = torch.randn(3, 4, device=device)
    fused = auto_convert_model(model.eval(), example_inputs=x, select="all")
    optimizer = torch.optim.SGD(fused.train().parameters(), 0.1)
    fused(x).square().sum().backward()
    optimizer.step()
    model.load_state_dict(fused.eval().state_dict())
    duplicate = copy.deepcopy(fused)
    with torch.no_grad():
        for each in (fused, duplicate):
            torch.testing.assert_close(each(x), model(x), rtol=1e-5, atol=1e-5)
            assert each.kfconvert_info()["guard"]["hits"]
        duplicate[2].bias.add_(1)
        torch.testing.assert_close(duplicate(x), model(x) + 1, rtol=1e-5, atol=1e-5)
