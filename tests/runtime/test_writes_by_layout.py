"""Writes in place through what is a view or a copy by its layout, which fused modules may change: they reach what they
reach in the original."""

import copy

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")


class Images(nn.Module):
    """A convolution whose results may be channels-last."""

    def __init__(self, read):
        super().__init__()
        self.conv, self.norm, self.read = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), read
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.read(torch.relu(self.norm(self.conv(x))), self.head)


class Norms(nn.Module):
    """An RMS norm whose results are contiguous where those of the original keep the order of its argument."""

    def __init__(self, read):
        super().__init__()
        self.head, self.read = nn.Linear(4, 4), read

    def forward(self, x):
        return self.read(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), self.head)


class Attentions(nn.Module):
    """Attention lays its results out by tokens; those of the original are laid out by heads."""

    def __init__(self, read):
        super().__init__()
        self.head, self.read = nn.Linear(4, 4), read

    def forward(self, x):
        scores = (x @ x.transpose(-2, -1) / 2).softmax(-1)
        return self.read(scores @ x, self.head)


X = torch.randn(2, 4, 6, 4)
LAYOUTS = {
    "contiguous": X,
    "channels last": X.to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 2, 6, 4).transpose(0, 1),
    "crop": torch.randn(2, 4, 9, 9)[:, :, 1:7, 2:6],
}
SHARING = {
    "flatten": lambda v: v.flatten(1),
    "contiguous": lambda v: v.contiguous(),
    "to channels last": lambda v: v.to(memory_format=torch.channels_last),
    "chunk of a reshape": lambda v: v.reshape(v.shape[0], -1).chunk(2, 1)[1],
    "as_strided": lambda v: v.as_strided((2, 12), (12, 1)),
}


def convert(model, example):
    converter = ModelConverter(select="all", validate_accuracy=False, effort="fast")
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=(example,))
    assert converter.conversion_stats["total_replaced"]
    return fused


def assert_alike(model, fused, example):
    for name, x in {"example": example, **LAYOUTS, "example again": example}.items():
        with torch.no_grad():
            expected, found = model(x), fused(x)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert fused.kfconvert_info()["guard"]["hits"] >= 2  # the example twice


def into_argument(v, u):
    u[:, :2] = 3.0
    return v


def into_result(v, u):
    v[:, 1:].mul_(2.0)
    return u.flatten(1).sum(1).reshape(-1, 1, 1, 1) + v


# What is written, the layout of the example
WRITES = [
    (into_argument, "contiguous"),
    (into_result, "contiguous"),
    (into_argument, "channels last"),
    (into_argument, "transposed"),
]


@pytest.mark.parametrize("kind", [Images, Norms, Attentions])
@pytest.mark.parametrize("sharing", SHARING)
def test_writes_reach_what_they_reach_in_the_original(sharing, kind):
    # One write in one layout for each kind and operator.
    number = list(SHARING).index(sharing) + [Images, Norms, Attentions].index(kind)
    write, example = WRITES[number % len(WRITES)]

    def read(v, head):
        v = v * 2
        return head(write(v, SHARING[sharing](v)))

    model = kind(read).eval()
    assert_alike(model, convert(model, LAYOUTS[example]), LAYOUTS[example])


@pytest.mark.parametrize("kind", [Images, Norms, Attentions])
def test_all_readers_of_a_value_that_is_returned_find_what_was_written(kind):
    def read(v, head):
        v = v * 2
        v[:, 0] = 3.0
        return torch.stack([head(v), v])

    class Before(kind):
        def forward(self, x):
            y = x * 2
            y[:, 0] = 3.0
            return torch.stack([super().forward(y), y]), y

    for model in (kind(read).eval(), Before(lambda v, head: head(v)).eval()):
        fused = convert(model, X)
        assert_alike(model, fused, X)
        assert not fused.kfconvert_info()["guard"]["misses"]


def test_results_lie_as_those_of_the_original_for_the_example():
    x = LAYOUTS["transposed"]
    for read in (lambda v, head: v, lambda v, head: v.as_strided((2, 12), (12, 1)) * 1):
        model = Norms(read).eval()
        fused = convert(model, x)
        with torch.no_grad():
            expected, found = model(x), fused(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        assert fused.kfconvert_info()["guard"]["hits"] == 1


class InPython(nn.Module):
    """A model of which only parts are captured, with writes in the code around them."""

    def __init__(self, write):
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)
        )
        self.write = write

    def forward(self, x):
        v = self.body(x) * 2
        if float(v.sum()) > 1e9:
            v = v + 1
        self.write(v)
        return self.head(v)


def add_to_rows(v):
    v.reshape(v.shape[0], -1)[:, :30].add_(1.0)


def only_read(v):
    v.add_(1.0)
    v.flatten(1).sum()


@pytest.mark.parametrize("write, served", [(add_to_rows, 1), (only_read, 2)])
def test_writes_in_the_code_around_parts(write, served):
    model = InPython(write).eval()
    fused = convert(model, X)
    with torch.no_grad():
        for x in (X, LAYOUTS["channels last"]):
            torch.testing.assert_close(fused(x), model(x), atol=1e-4, rtol=1e-4)
    guards = [part.forward for part in (fused.body, fused.head) if "forward" in vars(part)]
    assert guards and all(guard.hits == served for guard in guards)
