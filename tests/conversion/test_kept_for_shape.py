"""Models that keep a table or a number for the shape of their inputs, and make it anew for another shape."""

import copy

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")


class Body(nn.Module):
    """Something to fuse before a head that keeps something."""

    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.head = head

    def forward(self, x):
        return self.head(self.body(x))


def grid(height, width):
    return torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).float()


class Anchors(nn.Module):
    """As the heads of detectors: ``key`` of its input's shape says whether the anchors are those that it needs."""

    def __init__(self, key):
        super().__init__()
        self.conv, self.key, self.shape, self.anchors = nn.Conv2d(8, 2, 1), key, None, torch.empty(0)

    def forward(self, x):
        shape = self.key(x.shape)
        if self.shape != shape:
            self.anchors, self.shape = grid(*x.shape[2:]) * shape[0], shape
        return self.conv(x) + self.anchors


class Scale(nn.Module):
    """Keeps a number."""

    def __init__(self):
        super().__init__()
        self.conv, self.size, self.scale = nn.Conv2d(8, 2, 1), 0, 0.0

    def forward(self, x):
        if self.size != x.shape[-1]:
            self.size, self.scale = x.shape[-1], 1.0 / x.shape[-1]
        return self.conv(x) * self.scale


class InPlace(nn.Module):
    """Writes what it keeps for another size into the memory of a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.size = nn.Conv2d(8, 2, 1), 0
        self.register_buffer("table", torch.zeros(64))

    def forward(self, x):
        if self.size != x.shape[-1]:
            self.table.fill_(1.0 / x.shape[-1])
            self.size = x.shape[-1]
        return self.conv(x) * self.table[0]


def image(key):
    return key[2:]


def whole(key):
    return key


MODELS = {
    "anchors for images": lambda: Body(Anchors(image)),
    "anchors for images and batches": lambda: Body(Anchors(whole)),
    "a number": lambda: Body(Scale()),
    "in place": lambda: Body(InPlace()),
}
# (batch, size) of the calls, those of the example first.
CALLS = [(1, 16), (1, 16), (3, 16), (1, 16), (1, 24), (1, 16), (1, 16), (2, 24), (2, 16), (1, 16), (1, 16)]


def images(batch, size):
    return torch.rand(batch, 3, size, size)


def made(name, called):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    if called:
        model(images(1, 16))
    return model


def converted(model, **options):
    converter = ModelConverter(select="all", effort="fast")
    return converter.convert_model(copy.deepcopy(model), example_inputs=images(1, 16), **options)


def hits(fused):
    return fused.kfconvert_info()["guard"]["hits"]


@torch.no_grad()
def assert_as_the_original(model, fused):
    for batch, size in CALLS:
        x = images(batch, size)
        torch.testing.assert_close(fused(x), model(x))
    return hits(fused)


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_captured_for_the_shape_that_it_was_made_for(name, called):
    model = made(name, called)
    fused = converted(model)
    served = assert_as_the_original(model, fused)
    (whole, *_) = fused.kfconvert_info()["regions"]
    assert whole["captured"] and served >= 4
    with torch.no_grad():
        fused(images(1, 16))
    assert hits(fused) == served + 1


def test_so_it_is_after_a_load(tmp_path):
    model = made("anchors for images and batches", True)
    kfconvert.save(converted(model), tmp_path / "net")
    loaded = kfconvert.load(tmp_path / "net", model=made("anchors for images and batches", False))
    assert assert_as_the_original(model, loaded) >= 4


def test_a_frozen_model_serves_no_call_with_the_table_of_another_shape():
    model = made("a number", True)
    fused = kfconvert.freeze(converted(model))
    before = hits(fused)
    assert assert_as_the_original(model, fused) >= before + 4


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Conv2d(3, 8, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1.0 if self.calls < 1000 else 2.0)


def test_what_changes_with_the_same_inputs_changes_in_every_call():
    fused = converted(Counting().eval())
    assert fused.kfconvert_info()["regions"][0]["reason"] == "its forward changes calls in every call"


class Rotary(nn.Module):
    """Makes a longer table where its input is longer than all before."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear, self.longest = nn.Embedding(20, 16), nn.Linear(16, 16), 0
        self.register_buffer("table", torch.empty(0), persistent=False)

    def forward(self, ids):
        length = ids.shape[1]
        if length > self.longest:
            self.table, self.longest = torch.outer(torch.arange(length), torch.ones(16)).cos(), length
        return torch.relu(self.linear(self.embed(ids))) * self.table[:length]


@pytest.mark.parametrize("length", [1, 6])
def test_a_table_for_the_longest_input(length):
    torch.manual_seed(0)
    model = Rotary().eval()
    example = torch.randint(20, (2, length))
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), example_inputs=example)
    with torch.no_grad():
        for each in (length, 1, 6, 1, length, 4, 1, 9, 4, length, length):
            ids = torch.randint(20, (2, each))
            torch.testing.assert_close(fused(ids), model(ids))
    if length > 1:
        assert hits(fused) >= 3
