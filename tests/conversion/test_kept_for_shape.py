"""Models that keep a table or a number for the shape of their inputs, and make it anew for another shape."""

import copy

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")


class Body(nn.Module):
    """Something to fuse before a head that keeps something, and a factor that the head leaves."""

    def __init__(self, head, reads=None):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.head, self.reads = head, reads

    def forward(self, x):
        y = self.head(self.body(x))
        return y if self.reads is None else y * self.reads(self.head)


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
    """Writes what it keeps for another size into the memory of a buffer, or of a part of it."""

    def __init__(self, part):
        super().__init__()
        self.conv, self.size, self.part = nn.Conv2d(8, 2, 1), 0, part
        self.register_buffer("table", torch.zeros(64))

    def forward(self, x):
        if self.size != x.shape[-1]:
            (self.table[:8] if self.part else self.table).fill_(1.0 / x.shape[-1])
            self.size = x.shape[-1]
        return self.conv(x) * self.table[0]


class InDict(nn.Module):
    """Keeps both in one dict."""

    def __init__(self):
        super().__init__()
        self.conv, self.held = nn.Conv2d(8, 2, 1), {"shape": None, "grid": None}

    def forward(self, x):
        if self.held["shape"] != x.shape[2:]:
            self.held.update(shape=x.shape[2:], grid=grid(*x.shape[2:]))
        return self.conv(x) + self.held["grid"]


def image(key):
    return key[2:]


def whole(key):
    return key


MODELS = {
    "anchors for images": lambda: Body(Anchors(image)),
    "anchors for images and batches": lambda: Body(Anchors(whole)),
    "read outside": lambda: Body(Anchors(image), lambda head: float(head.shape[0])),
    "a number": lambda: Body(Scale()),
    "in place": lambda: Body(InPlace(part=False)),
    "in place, in part": lambda: Body(InPlace(part=True)),
    "in a dict": lambda: Body(InDict()),
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


class ByLength(nn.Module):
    """A long call leaves what a step reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear, self.left = nn.Embedding(20, 16), nn.Linear(16, 16), torch.ones(16)

    def forward(self, ids):
        y = torch.relu(self.linear(self.embed(ids)))
        if ids.shape[1] > 1:
            self.left = y.mean((0, 1))
            return y
        return y + self.left


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
@pytest.mark.parametrize("kind", [ByLength, Rotary])
def test_lengths(kind, length):
    torch.manual_seed(0)
    model = kind().eval()
    example = torch.randint(20, (2, length))
    fused = ModelConverter(select="all", effort="fast").convert_model(copy.deepcopy(model), example_inputs=example)
    with torch.no_grad():
        for each in (length, 1, 6, 1, length, 4, 1, 9, 4, length, length):
            ids = torch.randint(20, (2, each))
            torch.testing.assert_close(fused(ids), model(ids))
    if kind is Rotary and length > 1:
        assert hits(fused) >= 3


class ClearedTable(nn.Module):
    """As attention in timm's LeViT: a table by device, which a change of the mode clears."""

    def __init__(self):
        super().__init__()
        self.conv, self.bias, self.table = nn.Conv2d(8, 2, 1), nn.Parameter(torch.randn(2, 1, 1)), {}

    def train(self, mode=True):
        self.table = {}
        return super().train(mode)

    def forward(self, x):
        if x.device not in self.table:
            self.table[x.device] = self.bias.detach() * 2
        return self.conv(x) + self.table[x.device]


def test_a_table_that_is_filled_with_equal_values_again_is_no_change():
    model, x = Body(ClearedTable()).eval(), torch.rand(2, 3, 8, 8)
    fused = ModelConverter(select="all").convert_model(copy.deepcopy(model), example_inputs=x)

    def called():
        before = fused.kfconvert_info()["guard"]["hits"]
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fused(x), model(x))
        return fused.kfconvert_info()["guard"]["hits"] - before

    assert called() == 3
    for each in (model, fused):
        each.eval()
    assert called() == 2  # the first call fills the table
    with torch.no_grad():
        for each in (model, fused):
            each.head.bias.mul_(3)
            each.eval()
    assert called() == 0
