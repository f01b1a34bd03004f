"""Forwards as people write them: state that they make for longer inputs, noise that they put back, constants of their
own, statistics of every call, questions about the grad mode; and backward passes in unusual places."""

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(torch.relu(self.linear(x)))


class Positions(Block):
    """Has a row for each position, and makes more of them for a longer input."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.kind = nn.Embedding(20, 8), kind
        self.rows = nn.Embedding(4, 8) if kind == "module" else nn.Parameter(torch.randn(4, 8))

    def forward(self, ids):
        length = ids.shape[1]
        weight = self.rows.weight if self.kind == "module" else self.rows
        if length > weight.shape[0]:
            longer = F.interpolate(weight.detach().t()[None], size=length, mode="linear")[0].t().contiguous()
            if self.kind == "module":
                self.rows = nn.Embedding.from_pretrained(longer)
            elif self.kind == "parameter":
                self.rows = nn.Parameter(longer)
            else:
                self.rows.data = longer
            weight = longer
        return super().forward(self.table(ids) + weight[:length])


@pytest.mark.parametrize("kind", ["module", "parameter", "data"])
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_what_a_forward_makes_for_longer_inputs(kind):
    torch.manual_seed(0)
    model, ids = Positions(kind).eval(), torch.randint(20, (2, 6))
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, example_inputs=ids
    )
    with torch.no_grad():
        for given in (ids, ids[:, :3], torch.randint(20, (2, 9)), ids):
            torch.testing.assert_close(fused(given), model(given))
    assert [p.shape for p in fused.parameters()] == [p.shape for p in model.parameters()]


class PutBack(Block):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return super().forward(x + torch.randn(8))


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_noise_that_leaves_the_generator_as_it_was():
    model = PutBack().eval()
    x = torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fused(x), model(x))


class Normalized(Block):
    def forward(self, x):
        return super().forward((x - torch.tensor([0.1] * 8)) / torch.tensor([float(n) for n in range(1, 9)]))


def test_constants_that_a_forward_makes_are_captured():
    model, x = Normalized().eval(), torch.randn(4, 8)
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    fused = converter.convert_model(model, example_inputs=x)
    assert converter.conversion_stats["regions"][0]["captured"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


class BatchStatistics(nn.BatchNorm1d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=True)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_statistics_are_counted_once_a_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), BatchStatistics(8), nn.ReLU()).eval()
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        model, example_inputs=torch.randn(4, 8)
    )
    for wanted in (False, True, False, True):
        x = torch.randn(4, 8)
        with torch.set_grad_enabled(wanted):
            outputs = [each(x) for each in (model, fused)]
        if wanted:
            for each in outputs:
                each.sum().backward()
        torch.testing.assert_close(fused[2].running_var, model[2].running_var)
        torch.testing.assert_close(*outputs)


class AsksForGradMode(Block):
    def forward(self, x):
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_the_grad_mode_counts_where_nothing_wants_a_gradient():
    model, x = AsksForGradMode().eval().requires_grad_(False), torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            torch.testing.assert_close(fused(x), model(x))


def test_backward_within_inference_mode():
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    for each in (model, fused):
        loss = each(x).square().sum()
        with torch.inference_mode():
            loss.backward()
    for one, other in zip(fused.parameters(), model.parameters()):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


class ReturnsAttributes(Block):
    def forward(self, x):
        return AttributeDict(hidden=super().forward(x), sizes=collections.OrderedDict(rows=x.shape[0]))


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_mapping_whose_attributes_are_its_items():
    model, x = ReturnsAttributes().eval(), torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x).hidden, model(x).hidden)


class Shortcut(nn.Module):
    """As the bottlenecks of timm's GhostNet: an empty ``Sequential`` is the identity, and is false."""

    def __init__(self):
        super().__init__()
        self.body, self.shortcut = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential()

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


def test_an_empty_sequential_is_captured():
    model, x = Shortcut().eval(), torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["guard"]["hits"] == 1
