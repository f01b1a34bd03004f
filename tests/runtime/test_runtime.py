"""A converted model: what its guard admits, what falls back to the original, and what stays as it was."""

import copy

import pytest
import torch
import transformers
from torch import nn

from kfconvert import ModelConverter
from kfconvert.runtime.dispatch.guarded import guarded_forward, uninstall


class Net(nn.Module):
    """Convolutions, a residual, dropout and a head; a keyword with a default."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return {"logits": torch.sigmoid(self.head(self.drop(x.mean((2, 3))))) * scale, "features": x}


def make():
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.train()(torch.randn(8, 3, 10, 10))  # running statistics that differ from a fresh norm's
    return net.eval()


@pytest.fixture
def net():
    return make()


@pytest.fixture(scope="module")
def converted():
    return convert(make())


@pytest.fixture
def fused(converted):
    return copy.deepcopy(converted)


def convert(net, **options):
    return ModelConverter(select="all", effort="fast").convert_model(net, input_shape=(2, 3, 10, 10), **options)


def images(batch=2):
    return torch.randn(batch, 3, 10, 10)


def same(one, other, x, **kwargs):
    expected, actual = other(x, **kwargs), one(x, **kwargs)
    torch.testing.assert_close(actual, expected)
    assert actual["features"].stride() == expected["features"].stride()


def guard(model):
    return model.kfconvert_info()["guard"]


def test_any_batch_size_hits(net, fused):
    with torch.no_grad():
        for batch in (1, 2, 3, 7):
            same(fused, net, images(batch))
        assert fused(x=images(), scale=1.0)["logits"].shape == (2, 4)
    assert guard(fused) == {"hits": 5, "misses": {}}


def test_an_empty_batch_runs_the_original(net, fused):
    with pytest.warns(RuntimeWarning, match="original forward"), torch.no_grad():
        same(fused, net, images(0))


def test_another_call_form_runs_the_original_and_is_counted(net, fused):
    with pytest.warns(RuntimeWarning, match="other arguments"), torch.no_grad():
        same(fused, net, images(), scale=2.0)
    with torch.no_grad():
        same(fused, net, images(), scale=2.0)
    assert sum(guard(fused)["misses"].values()) == 2


def test_autocast_runs_the_original(fused):
    with pytest.warns(RuntimeWarning, match="autocast"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fused(images())


def test_uninstall_gives_the_plain_model_back(fused):
    uninstall(fused)
    assert "forward" not in fused.__dict__ and not hasattr(fused, "kfconvert_info")


class AlwaysDrops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.dropout(torch.relu(self.linear(x)), 0.5, training=True)


def test_a_random_forward_keeps_output_and_gradient_together():
    fused = fast(AlwaysDrops(), (2, 8))
    assert not guarded_forward(fused).variants[0].is_recorded  # replays would repeat the numbers
    with pytest.warns(RuntimeWarning, match="random"):
        output = fused(torch.ones(3, 8))
    output.sum().backward()
    kept = (output > 0).float().sum(0) * 2
    torch.testing.assert_close(fused.linear.bias.grad, kept)


def test_function_transforms_take_the_original(net, fused):
    x = images()

    def loss(model, x):
        return model(x)["logits"].sum()

    torch.testing.assert_close(torch.func.grad(lambda x: loss(fused, x))(x), torch.func.grad(lambda x: loss(net, x))(x))
    tangents = [torch.func.jvp(lambda x, m=m: loss(m, x), (x,), (torch.ones_like(x),))[1] for m in (net, fused)]
    torch.testing.assert_close(*tangents)


def test_functional_call_uses_and_differentiates_the_given_parameters(net, fused):
    gradients = []
    for model in (net, fused):
        given = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
        given = {name: p.requires_grad_() for name, p in given.items()}
        torch.func.functional_call(model, given, (torch.ones(2, 3, 10, 10),))["logits"].sum().backward()
        gradients.append(given["conv1.weight"].grad)
    torch.testing.assert_close(*gradients)


def fast(model, input_shape):
    return ModelConverter(select="all", effort="fast").convert_model(model, input_shape=input_shape)


class OwnCache(transformers.DynamicCache):
    """A class of caches of which nothing is known."""


class OwnCaching(transformers.GPT2LMHeadModel):
    def forward(self, input_ids):
        return super().forward(input_ids, past_key_values=OwnCache() if self.config.use_cache else None)


def test_a_cache_of_an_unknown_class_in_the_output_is_reported():
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=1)
    model, converter = OwnCaching(config), ModelConverter(select="all", effort="fast")
    converter.convert_model(model, input_shape=(1, 8))
    whole = converter.conversion_stats["regions"][0]
    assert not whole["captured"] and "use_cache = False" in whole["reason"]
    model.config.use_cache = False
    converter.convert_model(model, input_shape=(1, 8))
    assert converter.conversion_stats["regions"][0]["captured"]
    assert converter.conversion_stats["linear_gelu_tanh_replaced"] == 1


def test_a_decoder_may_not_have_its_cache_setting_turned_on_afterwards():
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=1, eos_token_id=1)
    config.use_cache = False
    fused = fast(transformers.GPT2LMHeadModel(config), (1, 8))
    fused.config.use_cache = True
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="use_cache"):
        assert fused(torch.randint(2, 50, (1, 8))).past_key_values is not None


def test_a_table_that_is_looked_up_must_be_where_it_was_before_a_replay():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleDict({"words": nn.Embedding(10, 8), "up": nn.Linear(8, 16)})

        def forward(self, ids):
            return nn.functional.gelu(self.body["up"](self.body["words"](ids)))

    ids = torch.zeros(2, 3, dtype=torch.long)
    fused = ModelConverter(select="all", effort="fast", validate_accuracy=False).convert_model(
        Embedded().eval(), example_inputs=ids
    )
    program = guarded_forward(fused).variants[0].program
    assert program.may_read()
    fused.body["up"] = nn.Linear(8, 16)  # its weights are in plans, which keep them
    assert program.may_read()
    words = fused.body["words"]
    fused.body["words"] = nn.Embedding(20, 8)
    assert not program.may_read()
    fused.body["words"] = words
    assert program.may_read()
    fused.body = nn.ModuleDict({"words": nn.Embedding(20, 8), "up": nn.Linear(8, 16)})
    assert not program.may_read()
