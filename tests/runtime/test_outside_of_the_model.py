"""What a forward reads that is not registered in the model, or in the part of it that was captured on its own."""

import copy
import weakref

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
    "bound method": (lambda layer: layer.forward, lambda held, x: held(x)),
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
    fused = ModelConverter(select="all").convert_model(model, example_inputs=ids)
    for each in (model, fused):
        each(ids).sum().backward()
    for (name, one), other in zip(model.named_parameters(), fused.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4, msg=name)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.gain()


class Around(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.scale, self.first, self.second = 2.0, Scaled(), Scaled()
        reference = weakref.ref(self)
        gains = {
            "method": self.get,
            "weak reference": lambda: reference().scale,
        }
        for part in (self.first, self.second):
            part.gain = gains[way]

    def get(self):
        return self.scale

    def forward(self, x):
        y = self.first(x)
        return y if y.abs().max() > 1e9 else self.second(y)


@pytest.mark.parametrize("way", ["method", "weak reference"])
@torch.no_grad()
def test_a_part_that_reads_what_lies_around_it(way):
    torch.manual_seed(0)
    model = Around(way).eval()
    torch.manual_seed(0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    fused = ModelConverter(select="all").convert_model(Around(way).eval(), example_inputs=x, inplace=True)
    for scale in (2.0, 3.0):
        model.scale = fused.scale = scale
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    parts = fused.kfconvert_info()["parts"]
    assert parts and all(counts["hits"] for counts in parts.values())


class Storing(nn.Module):
    last = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        Storing.last = torch.relu(self.up(x))
        return self.down(Storing.last)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Storing(), Storing(), nn.Linear(16, 8)

    def forward(self, x):
        y = self.first(x)
        return y if y.abs().max() > 1e9 else torch.relu(self.head(Storing.last))


@torch.no_grad()
def test_a_part_that_leaves_a_tensor_at_its_class():
    model = Reading().eval()
    fused = ModelConverter(select="all").convert_model(model, example_inputs=torch.randn(4, 8))
    for x in torch.randn(3, 4, 8):
        outputs = fused(x)
        torch.testing.assert_close(outputs, model(x), rtol=1e-4, atol=1e-5)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Wrapping(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.forward = inner, inner.forward


@torch.no_grad()
def test_a_forward_that_stands_in_another_module_stays_that_of_its_own():
    model = Plain().eval()
    fused = ModelConverter(select="all").convert_model(model, input_shape=(4, 8))
    other, x = Plain().eval(), torch.randn(4, 8)
    other.forward = fused.forward
    assert torch.equal(other(x), fused(x)) and torch.equal(Wrapping(fused)(x), fused(x))
    assert fused.kfconvert_info()["guard"] == {"hits": 4, "misses": {}}
    duplicate = copy.copy(fused)
    duplicate._modules = {"linear": nn.Linear(8, 8)}
    assert torch.equal(duplicate(x), torch.relu(duplicate.linear(x)))
