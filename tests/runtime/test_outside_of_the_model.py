"""What a forward reads that is not registered in the model, or in the part of it that was captured on its own."""

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


class Holder:
    pass


def within(module):
    holder = Holder()
    holder.module = module
    return holder


def closed(module):
    return lambda x: module(x)


# How the model holds a layer, and what it calls then.
WAYS = {
    "list": (lambda layer: [layer], lambda held, x: held[0](x)),
    "object": (within, lambda held, x: held.module(x)),
    "closure": (closed, lambda held, x: held(x)),
    "parameter in a list": (lambda layer: [layer.weight], lambda held, x: nn.functional.linear(x, held[0])),
}


class Net(nn.Module):
    def __init__(self, way, layer):
        super().__init__()
        self.own, self.way = nn.Linear(8, 8), way
        self.held = WAYS[way][0](layer)

    def forward(self, x):
        return torch.relu(self.own(x)) * WAYS[self.way][1](self.held, x)


def pair(way):
    """The layer and the model that holds it, of the original and of the converted model."""
    layers = [nn.Linear(8, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    models = [Net(way, layer).eval() for layer in layers]
    models[1].own.load_state_dict(models[0].own.state_dict())
    converter = ModelConverter(select="all")
    models[1] = converter.convert_model(models[1], example_inputs=torch.randn(4, 8), inplace=True)
    return layers, models


@torch.no_grad()
def twice_in_place(layer):
    layer.weight.mul_(2)


def loaded(layer):
    layer.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()})


def assigned(layer):
    layer.load_state_dict({name: value * 3 for name, value in layer.state_dict().items()}, assign=True)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_and_writes_to_what_is_not_registered(way):
    layers, models = pair(way)
    for model in models:
        model(torch.ones(4, 8)).sum().backward()
    torch.testing.assert_close(layers[1].weight.grad, layers[0].weight.grad)
    assert layers[0].weight.grad is not None
    with torch.no_grad():
        for write in (twice_in_place, loaded, assigned)[: 2 if way == "parameter in a list" else 3]:
            for x in torch.randn(2, 4, 8):
                torch.testing.assert_close(models[1](x), models[0](x))
                for layer in layers:
                    write(layer)
                torch.testing.assert_close(models[1](x), models[0](x))


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.around, self.linear = (embedding,), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(torch.relu(self.linear(x)), self.around[0].weight)


class Tied(nn.Module):
    """Values decide, so that parts are captured; one has a weight that lies outside of it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(20, 8)
        self.first, self.second = Head(self.embedding), Head(self.embedding)

    def forward(self, ids):
        y = self.first(self.embedding(ids))
        return y if y.abs().max() > 1e9 else self.second(self.linear(y))


def test_gradients_of_a_weight_that_a_part_borrows():
    model = Tied().eval()
    ids = torch.randint(20, (3, 5))
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, example_inputs=ids
    )
    for each in (model, fused):
        each(ids).sum().backward()
    for (name, one), other in zip(model.named_parameters(), fused.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4, msg=name)
