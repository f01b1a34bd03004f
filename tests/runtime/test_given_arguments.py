"""What a forward may ask of its arguments beyond their shapes and dtypes: other answers never run the fused program."""

import collections
import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kfconvert import ModelConverter, load, save

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(4, 8)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def body(self, x):
        return self.down(F.gelu(self.up(x)))


def converted(kind, *args, **kwargs):
    """(the original, the converted model)"""
    model = kind().eval()
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    fused = converter.convert_model(copy.deepcopy(model), example_inputs=kwargs or args)
    return model, fused


def assert_alike(model, fused, *args, **kwargs):
    with torch.no_grad():
        expected, actual = model(*args, **kwargs), fused(*args, **kwargs)
    torch.testing.assert_close(actual, expected, equal_nan=True)


class Scaled(Body):
    def forward(self, x, lengths, scale=1):
        return self.body(x), lengths * scale


class Reduced(Body):
    def forward(self, x, dim=False):
        return self.body(x) if dim is False else self.body(x).sum(int(dim))


class Floored(Body):
    def forward(self, x, floor=0.0):
        return self.body(x), torch.atan2(torch.full_like(x, floor), -x.abs())


@pytest.mark.parametrize(
    "kind, example, other",
    [
        (Scaled, (X, torch.arange(4)), {"scale": 1.0}),
        (Scaled, (X, torch.arange(4)), {"scale": True}),
        (Reduced, (X,), {"dim": 0}),
        (Floored, (X,), {"floor": -0.0}),
    ],
)
def test_values_that_are_equal_to_a_default_and_not_the_same(kind, example, other):
    model, fused = converted(kind, *example)
    assert_alike(model, fused, *example)
    assert_alike(model, fused, *example, **other)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


class Collecting(Body):
    def forward(self, x, features):
        features.append(F.gelu(self.up(x)))
        return self.down(features[-1])


class Stepping(Body):
    def forward(self, x, state):
        hidden = F.gelu(self.up(x + state["h"]))
        state["h"] = hidden.mean(1, keepdim=True)
        return self.down(hidden)


@pytest.mark.parametrize("kind, given", [(Collecting, []), (Stepping, {"h": torch.zeros(4, 1)})])
def test_lists_and_dicts_that_the_forward_writes_to(kind, given):
    model, fused = converted(kind, X, given)
    ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(X, theirs), model(X, ours))
    torch.testing.assert_close(theirs, ours)


class Comparing(Body):
    """Self-attention, of which the norm is left out, is told from attention to something else by ``is``."""

    def forward(self, x, context):
        return self.body(x + (context if context is x else self.norm(context)))


@pytest.mark.parametrize("example", [(X, X + 1), (X, X)], ids=["two tensors", "one tensor"])
def test_one_tensor_that_is_given_twice(example):
    model, fused = converted(Comparing, *example)
    assert_alike(model, fused, X, X + 1)
    assert_alike(model, fused, X, X)


def test_attention_to_itself_is_fused(tmp_path):
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    example = {"query": x, "key": x, "value": x, "need_weights": False}
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        copy.deepcopy(model), example_inputs=example
    )
    save(fused, tmp_path / "saved")
    for each in (fused, load(tmp_path / "saved", model=copy.deepcopy(model))):
        assert_alike(model, each, x, x, x, need_weights=False)
        assert each.kfconvert_info()["guard"]["hits"] == 1
        assert_alike(model, each, x, y, y, need_weights=False)


ASKED = {
    "is_contiguous": (lambda m, x: 2.0 if x.is_contiguous() else 3.0, lambda x: x.t().contiguous().t()),
    "stride": (lambda m, x: 1.0 + x.stride(0), lambda x: torch.cat([x, x], 1)[:, :8]),
    "requires_grad": (lambda m, x: 1.0 + x.requires_grad, lambda x: x.clone().requires_grad_()),
}


def asking(question):
    class Asking(Body):
        def forward(self, x):
            return self.body(x) * question(self, x)

    return Asking


@pytest.mark.parametrize("name", ASKED)
def test_what_the_forward_asks_of_an_argument(name, tmp_path):
    question, other = ASKED[name]
    model, fused = converted(asking(question), X)
    save(fused, tmp_path / "saved")
    again = load(tmp_path / "saved", model=copy.deepcopy(model))
    for each in (fused, again):
        assert_alike(model, each, X)
        assert_alike(model, each, other(X))
        assert each.kfconvert_info()["guard"]["hits"] == (name != "requires_grad")


def test_nested_tensors():
    model, fused = converted(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()), torch.randn(2, 5, 8))
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad():
        for ours, theirs in zip(fused(x).unbind(), model(x).unbind()):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_that_nests_what_is_masked(masked):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x, mask = torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    masks = {"src_key_padding_mask": mask}
    model, fused = converted(lambda: nn.TransformerEncoder(layer, 2), src=x, **(masks if masked else {}))
    assert_alike(model, fused, x, **masks)
    assert_alike(model, fused, x)


class Tagged(Body):
    def forward(self, x):
        y = self.body(x)
        y.mask = x > 0
        return y


class Described(Body):
    def forward(self, x):
        outputs = collections.OrderedDict(scores=self.body(x))
        outputs.mask = x > 0
        return outputs


class Leaf(Body):
    def forward(self, x):
        return self.body(x).detach().requires_grad_()


@pytest.mark.parametrize("kind", [Tagged, Described, Leaf])
def test_attributes_of_what_is_returned(kind):
    model, fused = converted(kind, X)
    with torch.no_grad():
        expected, actual = model(X), fused(X)
    assert vars(actual).keys() == vars(expected).keys()
    assert getattr(actual, "requires_grad", None) == getattr(expected, "requires_grad", None)


@pytest.mark.parametrize("fork", [False, True])
def test_a_forward_that_seeds_the_generator(fork):
    class Seeding(Body):
        def forward(self, x):
            with torch.random.fork_rng(devices=[]) if fork else contextlib.nullcontext():
                torch.manual_seed(7)
                noise = torch.randn_like(x)
            return self.body(x + noise)

    model, fused = converted(Seeding, X)
    with torch.no_grad():
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = model(X), torch.rand(1)
            torch.manual_seed(seed)
            torch.testing.assert_close((fused(X), torch.rand(1)), expected)


def test_parts_whose_code_asks_for_strides_serve_the_example():
    class Strided(Body):
        def forward(self, x):
            return self.body(x) * (1.0 + x.stride(0))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Strided()

        def forward(self, x):
            if x.sum() > 1e9:  # which leaves the part to be captured
                x = x * 0
            return self.inner(x.t()) + self.inner(x.t())

    model, fused = converted(Outer, torch.randn(8, 6))
    assert_alike(model, fused, torch.randn(8, 6))
    assert fused.kfconvert_info()["parts"]["inner"] == {"hits": 2, "misses": {}}
