"""What code asks of tensors that the stand-ins of a trace answer otherwise: a model goes on doing what it does."""

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(3, 8)
TABLE = {}


class Net(nn.Module):
    """``factor``: what its forward multiplies with, a function of the module and its input."""

    def __init__(self, factor=None):
        super().__init__()
        self.factor = factor
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + nn.functional.gelu(self.linear(x))) * self.factor(self, x)


def converted(model, example=X):
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(model.eval(), example_inputs=(example,), inplace=True), converter.conversion_stats


def refusal(stats):
    return stats["regions"][0]["reason"]


ATTRIBUTES = {
    "getattr": lambda m, x: getattr(m.linear.weight, "scale", 1.0),
    "vars": lambda m, x: vars(m.linear.weight).get("scale", 1.0),
    "of a buffer": lambda m, x: getattr(m.buffer, "scale", 1.0),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
@torch.no_grad()
def test_an_attribute_that_a_tensor_of_the_model_has(name):
    net = Net(ATTRIBUTES[name]).eval()
    net.register_buffer("buffer", torch.ones(8))
    net.linear.weight.scale = net.buffer.scale = 3.0
    expected = net(X)
    model, stats = converted(net)
    torch.testing.assert_close(model(X), expected)
    assert refusal(stats) is not None


def identified(make, factor):
    """A net that keeps what ``make`` makes of its weight."""
    net = Net(factor)
    net.known = make(net.linear.weight)
    return net


def weakly(weight):
    kept = WeakTensorKeyDictionary()
    kept[weight] = 3.0
    return kept


IDENTITIES = {
    "id": lambda: identified(id, lambda m, x: 3.0 if id(m.linear.weight) == m.known else 1.0),
    "weak keys": lambda: identified(weakly, lambda m, x: m.known.get(m.linear.weight, 1.0)),
    "table": lambda: identified(lambda w: TABLE.update({id(w): 3.0}), lambda m, x: TABLE.get(id(m.linear.weight), 1.0)),
}


@pytest.mark.parametrize("name", IDENTITIES)
@torch.no_grad()
def test_the_identity_of_a_weight(name):
    net = IDENTITIES[name]().eval()
    expected = net(X)
    model, stats = converted(net)
    torch.testing.assert_close(model(X), expected)
    assert refusal(stats) is not None


@torch.no_grad()
def test_a_copy_keeps_what_was_set_on_its_parameters():
    net = Net(ATTRIBUTES["getattr"]).eval()
    net.linear.weight.scale = 3.0
    model = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(net, example_inputs=(X,))
    torch.testing.assert_close(model(X), net(X))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_plain_model_is_captured(kind):
    model, stats = converted(Net(lambda m, x: 2.0).to(kind), X.to(kind))
    assert refusal(stats) is None
