"""Forwards that draw random numbers from the generators of Python, NumPy and torch, the process's or their own."""

import random

import numpy
import pytest
import torch
from support.selection import each_once
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 16)
MAKE = {
    "python": lambda: random.Random(0),
    "numpy": lambda: numpy.random.default_rng(0),
    "numpy with arrays": lambda: numpy.random.Generator(numpy.random.MT19937(0)),
    "numpy's old one": lambda: numpy.random.RandomState(0),
    "torch": lambda: torch.Generator().manual_seed(0),
}


class Holder:
    def __init__(self, generator):
        self.generator = generator


class Skipping(nn.Module):
    """Skips its layer now and then, as stochastic depth does: so seldom that two calls may well agree."""

    def __init__(self, held=None):
        super().__init__()
        self.linear, self.held = nn.Linear(16, 16), held

    def generator(self):
        return self.held

    def forward(self, x):
        generator = self.generator()
        drawn = torch.rand((), generator=generator).item() if type(generator) is torch.Generator else generator.random()
        return x if drawn < 0.1 else torch.relu(self.linear(x))


class InAList(Skipping):
    def generator(self):
        return self.held[0]


class InAnObject(Skipping):
    def generator(self):
        return self.held.generator


PLACES = {"attribute": Skipping, "list": InAList, "object": InAnObject}


def convert(model):
    return ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model.eval(), example_inputs=X
    )


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_the_generators_of_the_process(draw):
    class Drawing(nn.Linear):
        def forward(self, x):
            return torch.relu(super().forward(x)) * draw()

    fused = convert(Drawing(16, 16))
    with torch.no_grad():
        assert not torch.equal(fused(X), fused(X))


@each_once(place=PLACES, kind=MAKE)
def test_the_own_generators_of_a_model(place, kind):
    make = MAKE[kind]
    held = {"list": lambda: [make()], "object": lambda: Holder(make())}.get(place, make)
    model = PLACES[place](held()).eval()
    fused = convert(model)  # which leaves its copy of the generator where it was
    found = []
    for each in (model, fused):
        with torch.no_grad():
            found.append(torch.stack([each(X) for _ in range(30)]))
    torch.testing.assert_close(*found)
