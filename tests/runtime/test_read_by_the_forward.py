"""What a forward asks of torch and of what it holds, beyond plain attributes: never fixed silently."""

import copy

import pytest
import timm
import torch
from torch import nn

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert")
X = torch.randn(3, 16)


def convert(model, **options):
    options.setdefault("example_inputs", X)
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False)
    return converter.convert_model(model.eval(), **options)


def assert_alike(model, fused, change, *inputs):
    """Before the change, after it, and once more."""
    inputs = inputs or (X,)
    with torch.no_grad():
        torch.testing.assert_close(fused(*inputs), model(*inputs))
        for each in (model, fused):
            change(each)
        for _ in range(2):
            torch.testing.assert_close(fused(*inputs), model(*inputs))


class Reading(nn.Module):
    """``read(self)`` is a factor."""

    def __init__(self, held=None):
        super().__init__()
        self.linear, self.held = nn.Linear(16, 16), held

    def read(self):
        return 1.0

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.read()


HOLDERS = {
    "equal list": ([2.0], lambda h: h[0], lambda m: setattr(m, "held", [2.0]), lambda m: m.held.__setitem__(0, 3.0)),
    "order of a dict": (
        {"a": 2.0, "b": 5.0},
        lambda h: next(iter(h.values())),
        None,
        lambda m: m.held.update(a=m.held.pop("a")),
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_container_holds(name):
    held, read, before, change = HOLDERS[name]

    class Holding(Reading):
        def read(self):
            return read(self.held)

    model = Holding(copy.deepcopy(held)).eval()
    fused = convert(model)
    if before is not None:
        assert_alike(model, fused, before)
    assert_alike(model, fused, change)


def test_a_module_that_only_a_list_holds():
    model = Reading([nn.LayerNorm(16)])
    model.read = lambda: 1.0

    class Hidden(Reading):
        def forward(self, x):
            return self.held[0](torch.relu(self.linear(x)))

    for change in (
        lambda m: setattr(m.held[0], "eps", 1.0),
        lambda m: m.held[0].register_forward_hook(lambda module, inputs, output: output * 2),
    ):
        model = Hidden([nn.LayerNorm(16)]).eval()
        assert_alike(model, convert(model), change)


@pytest.mark.parametrize("asked", ["grad", "requires_grad", "inference", "deterministic"])
def test_modes_that_the_forward_asks_for(asked):
    class Asking(Reading):
        def forward(self, x):
            y = torch.relu(self.linear(x))
            if asked == "grad":
                return y * 2 if torch.is_grad_enabled() else y
            if asked == "requires_grad":
                return y * 2 if x.requires_grad else y
            if asked == "inference":
                return y * 2 if torch.is_inference_mode_enabled() else y
            return y * 2 if torch.are_deterministic_algorithms_enabled() else y

    model = Asking().eval()
    fused = convert(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))
    with torch.inference_mode():
        torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fused(X.clone().requires_grad_()), model(X.clone().requires_grad_()))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            torch.testing.assert_close(fused(X), model(X))
    finally:
        torch.use_deterministic_algorithms(False)


def test_images_that_are_laid_out_otherwise_than_the_example():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    fused = convert(model, example_inputs=x.to(memory_format=torch.channels_last))
    larger = torch.randn(2, 10, 10, 3).permute(0, 3, 1, 2)
    served = (x.to(memory_format=torch.channels_last), larger[:, :, 1:9, :8], larger[:1, :, 1:9, :8])
    others = (x, x.transpose(2, 3), larger.contiguous()[:, :, 1:9, :8], larger.transpose(2, 3)[:, :, 1:9, :8])
    with torch.no_grad():
        for image in (*served, *others):
            assert fused(image).stride() == model(image).stride()
    assert fused.kfconvert_info()["guard"]["hits"] == len(served)


def test_attention_functions_that_transformers_looks_up(monkeypatch):
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(2, 50, (2, 8))
    fused = convert(model, example_inputs=ids)
    own = torch.nn.functional.scaled_dot_product_attention

    def other(*args, **kwargs):
        return own(*args, **kwargs) * 2

    with torch.no_grad():
        before = fused(ids).last_hidden_state
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", other)
        torch.testing.assert_close(fused(ids).last_hidden_state, model(ids).last_hidden_state)
        monkeypatch.undo()
        torch.testing.assert_close(fused(ids).last_hidden_state, before)
    assert fused.kfconvert_info()["guard"]["hits"] == 2


def test_hooks_of_all_modules_during_a_conversion_are_not_kept():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    try:
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
        fused = convert(copy.deepcopy(model))
    finally:
        handle.remove()
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X))


SEEN = []


class Remembering(Reading):
    """Adds what the last call has returned."""

    def forward(self, x):
        y = torch.relu(self.linear(x)) + (0 if self.held is None else self.held)
        self.held = y
        return y


class Window(Reading):
    def forward(self, x):
        y = torch.relu(self.linear(x)) + sum(self.held)
        self.held.append(y)
        return y


class Outside(Reading):
    def forward(self, x):
        SEEN.append(torch.relu(self.linear(x)))
        return SEEN[-1] + sum(seen.mean() for seen in SEEN)


STATES = {"none at first": lambda: Remembering(), "list": lambda: Window([]), "a global": lambda: Outside()}


@pytest.mark.parametrize("name", STATES)
def test_a_state_in_whatever_holds_it(name):
    model = STATES[name]().eval()
    fused = convert(copy.deepcopy(model))
    expected, actual = [], []
    with torch.no_grad():
        for each, outputs in ((model, expected), (fused, actual)):
            SEEN.clear()
            outputs += [each(X) for _ in range(4)]
    torch.testing.assert_close(actual, expected)
    SEEN.clear()


def test_what_a_conversion_puts_into_globals_goes_again():
    convert(Outside().eval())
    assert SEEN == []


def test_a_rate_that_only_a_dropout_reads_may_change():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)).eval()
    fused = convert(copy.deepcopy(model))
    assert_alike(model, fused, lambda m: setattr(m[2], "p", 0.5))
    assert fused.kfconvert_info()["guard"]["misses"] == {}


def test_how_much_memory_training_takes_is_no_change_of_calls_in_eval_mode():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    images = torch.randn(2, 3, 32, 32)
    fused = convert(copy.deepcopy(model), example_inputs=images)
    assert_alike(model, fused, lambda m: m.set_grad_checkpointing(), images)
    assert fused.kfconvert_info()["guard"]["misses"] == {}


# What every module holds: it has no effect on a fused call.
HELD_BY_ALL = (
    lambda m: m.register_forward_hook(lambda *_: None),
    lambda m: m.register_full_backward_hook(lambda *_: None),
    lambda m: m.register_buffer("extra", torch.ones(4), persistent=False),
)


def test_hooks_of_the_model_itself_are_no_change():
    model = Reading().eval()
    fused = convert(copy.deepcopy(model))
    assert_alike(model, fused, lambda m: [change(m) for change in HELD_BY_ALL])
    assert fused.kfconvert_info()["guard"]["hits"] == 3


class AtTwoPlaces(nn.Module):
    """Of modules that are registered at two places each, which the exporter runs as objects of other classes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.GELU()
        self.steps = nn.Sequential(self.first, self.norm, self.act, nn.Linear(8, 8), self.norm, self.act, self.first)
        self.inner = Scaled()
        self.again = nn.ModuleList([self.inner])

    def forward(self, x):
        return self.again[0](self.steps(self.inner(x)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.norms = 2.0, nn.ModuleList([nn.LayerNorm(8)])

    def forward(self, x):
        return self.norms[0](x) * self.factor


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.norm, "eps", 3.0),
        lambda model: vars(model.norm).update(eps=3.0),
        lambda model: setattr(model.act, "approximate", "tanh"),
        lambda model: setattr(model.inner, "factor", 5.0),
        lambda model: setattr(model.inner.norms[0], "eps", 3.0),
        lambda model: setattr(model.inner.norms[0], "weight", nn.Parameter(torch.full((8,), 3.0))),
    ],
)
def test_modules_at_two_places_are_watched(change):
    torch.manual_seed(0)
    model = AtTwoPlaces().eval()
    x = torch.randn(4, 8)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(model, example_inputs=x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        assert fused.kfconvert_info()["guard"]["hits"] == 1
        before = model(x)
        for each in (model, fused):
            change(each)
        assert not torch.equal(model(x), before)
        torch.testing.assert_close(fused(x), model(x))
