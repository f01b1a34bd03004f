"""Submodules that are captured on their own: where the model cannot be, and where a call misses its guard."""

import warnings

import pytest
import torch
import transformers
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter, load, save
from kfconvert.capture import captured as capture
from kfconvert.capture import parts
from kfconvert.capture.deadline import Budget
from kfconvert.capture.structure import groups
from kfconvert.conversion.selector import Decision
from kfconvert.runtime.dispatch.guarded import guarded_forward


class MLP(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Branching(nn.Module):
    """Control flow on data: the whole cannot be captured, the layers can."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if x.sum() > 1e9:
                break
        return x


def convert(model, effort="full", **options):
    converter = ModelConverter(select="all", effort=effort)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converter.convert_model(model.eval(), **options), converter.conversion_stats


def hits(fused):
    return {path: part["hits"] for path, part in fused.kfconvert_info()["parts"].items()}


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_children_are_fused_where_the_whole_depends_on_data():
    model = Branching()
    fused, stats = convert(model, input_shape=(2, 5, 16))
    assert not stats["regions"][0]["captured"] and stats["accuracy"]["passed"]
    assert stats["linear_relu_replaced"] == 3 and stats["total_replaced"] == 6
    assert [site["module"] for site in stats["sites"]][:2] == ["layers.0.up", "layers.0.down"]
    with torch.no_grad():
        for shape in ((2, 5, 16), (1, 5, 16), (7, 1, 16), (3, 4, 16)):
            x = torch.randn(shape)
            torch.testing.assert_close(fused(x), model(x))
    assert hits(fused) == {f"layers.{i}": 4 for i in range(3)}
    assert all(part["misses"] == {} for part in fused.kfconvert_info()["parts"].values())


def test_layers_of_one_structure_share_one_graph_and_keep_their_weights():
    fused, _ = convert(Branching(), input_shape=(2, 5, 16))
    regions = {id(guarded_forward(layer).variants[0].region) for layer in fused.layers}
    assert len(regions) == 1
    with torch.no_grad():
        fused.layers[1].down.weight.zero_()
        fused.layers[1].down.bias.fill_(3.0)
        assert fused.layers[1](torch.randn(2, 5, 16)).eq(3).all()
        assert not fused.layers[0](torch.randn(2, 5, 16)).eq(3).any()


def test_a_call_that_misses_the_guard_of_the_whole_keeps_the_blocks_fused():
    model, ids = llama(), torch.randint(2, 64, (2, 5))
    fused, stats = convert(model, example_inputs={"input_ids": ids, "use_cache": False})
    assert stats["regions"][0]["captured"]
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="other arguments"):
        ours = fused(ids, use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        theirs = model(ids, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states)
    assert sum(hits(fused).values()) > 0
    assert torch.equal(fused.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


@pytest.fixture
def captured_parts(monkeypatch):
    """The modules that the search for parts has captured, in order."""
    found, own = [], parts.capture

    def noted(module, *args):
        capture = own(module, *args)
        found.append(module)
        return capture

    monkeypatch.setattr(parts, "capture", noted)
    return found


def three_kinds():
    model = Branching()
    model.layers[1] = nn.Sequential(MLP(), nn.LayerNorm(16))
    model.layers[2] = nn.Sequential(MLP(), nn.Tanh(), nn.Linear(16, 16))
    return model


def test_parts_that_there_was_no_time_for_are_counted_and_named(monkeypatch, captured_parts):
    monkeypatch.setattr(Budget, "left", lambda budget: -1.0 if captured_parts[1:] else 60.0)
    _, stats = convert(three_kinds(), input_shape=(2, 5, 16), effort="fast")
    assert stats["parts_left_out"] >= 1 and len(captured_parts) == 2
    late = [region for region in stats["regions"] if "no time was left" in str(region["reason"])]
    assert late and all(region["module"].startswith("layers.") and region["location"] for region in late)


def test_the_slowest_parts_are_captured_first(monkeypatch, captured_parts):
    def seconds(model, call):
        return {each: float(path[-1]) if path[-1:].isdigit() else 0.0 for path, each in model.named_modules()}

    monkeypatch.setattr(parts, "seconds_within", seconds)
    fused, _ = convert(three_kinds(), input_shape=(2, 5, 16), effort="fast", inplace=True)
    assert captured_parts[:2] == [fused.layers[2], fused.layers[1]] and fused.layers[0] in captured_parts


class OwnCache(transformers.DynamicCache):
    """A class of caches of which nothing is known."""


class OwnCaching(transformers.LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask, past_key_values=OwnCache())


def test_a_model_that_returns_a_cache_of_an_unknown_class_is_not_traced_in_vain(monkeypatch):
    traced = []
    trace = capture.trace
    monkeypatch.setattr(capture, "trace", lambda module, *args: traced.append(module) or trace(module, *args))
    model = OwnCaching(llama().config).eval()
    _, stats = convert(model, example_inputs={"input_ids": torch.randint(2, 64, (2, 5))})
    whole = [region for region in stats["regions"] if not region["module"]]
    assert len(whole) == 2 and all("the output holds a key-value cache" in region["reason"] for region in whole)
    names = [type(module).__name__ for module in traced]
    assert "OwnCaching" not in names and "LlamaModel" not in names


def test_what_was_not_captured_is_told_with_file_and_line():
    _, stats = convert(OwnCaching(llama().config), example_inputs={"input_ids": torch.randint(2, 64, (2, 5))})
    attention = next(region for region in stats["regions"] if region["name"] == "model.layers.0.self_attn")
    assert not attention["captured"] and "OwnCache" in attention["reason"]
    assert attention["location"].startswith("transformers/models/llama/modeling_llama.py:")
    _, stats = convert(Branching(), input_shape=(2, 5, 16))
    assert "test_parts.py:" in stats["regions"][0]["location"]


def test_lists_of_images_of_any_size():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.head = MLP(8)

        def forward(self, images):
            found = [self.backbone(image[None]) for image in images]
            return [self.head(f.mean((2, 3))) for f in found if f.max() > 0]

    model = Detector()
    fused, stats = convert(model, example_inputs=([torch.randn(3, 32, 40), torch.randn(3, 24, 56)],))
    assert stats["conv_bn_relu_replaced"] == 1 and stats["linear_relu_replaced"] == 1
    images = [torch.randn(3, 48, 33), torch.randn(3, 17, 64)]
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model(images))
    assert hits(fused) == {"backbone": 2, "head": 2}


def test_hooks_inside_are_called_and_what_has_none_is_fused():
    model, seen = Branching(), []
    model.layers[1].up.register_forward_hook(lambda module, inputs, output: seen.append(1))
    fused, stats = convert(model, input_shape=(2, 5, 16))
    seen.clear()
    with torch.no_grad():
        fused(torch.randn(2, 5, 16))
    assert seen == [1]
    assert {"layers.0", "layers.2"} <= hits(fused).keys() and "layers.1" not in hits(fused)


def test_a_number_that_the_forward_reads_divides_the_layers():
    class Numbered(MLP):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            return super().forward(x) * self.number

    model = Branching()
    model.layers = nn.ModuleList(Numbered(number) for number in (1, 2, 1))
    assert len(groups(model.layers, also=lambda _: ())) == 1
    fused, stats = convert(model, input_shape=(2, 5, 16))
    assert stats["linear_relu_replaced"] == 3
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    regions = [guarded_forward(layer).variants[0].region for layer in fused.layers]
    assert regions[0] is regions[2] and regions[0] is not regions[1]


def test_a_number_that_the_forward_does_not_read_does_not_divide_the_layers():
    model = Branching()
    for number, layer in enumerate(model.layers):
        layer.number = number
    fused, stats = convert(model, input_shape=(2, 5, 16))
    assert stats["linear_relu_replaced"] == 3
    assert len({id(guarded_forward(layer).variants[0].region) for layer in fused.layers}) == 1


@pytest.mark.parametrize("whole", [True, *exhaustive(False)])
def test_an_artifact_keeps_the_parts(tmp_path, whole):
    model, ids = llama(), torch.randint(2, 64, (2, 5))
    inputs = {"input_ids": ids, "use_cache": False} if whole else {"input_ids": ids}
    fused, stats = convert(model, example_inputs=inputs)
    save(fused, tmp_path / "llama")
    loaded = load(tmp_path / "llama", model=llama())
    assert hits(loaded).keys() == hits(fused).keys()
    info = loaded.kfconvert_info()
    assert info["part_sites"] == stats["part_sites"] and info["total_replaced"] == stats["total_replaced"]
    assert torch.equal(loaded.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert max(hits(loaded).values()) > 0 if whole else loaded.kfconvert_info()["guard"] == {"hits": 4, "misses": {}}


@pytest.mark.parametrize("served, off", [(0, True), (40, False)])
def test_a_part_whose_arguments_are_mostly_others_is_switched_off_and_named(served, off):
    model = Branching()
    fused, _ = convert(model, input_shape=(2, 5, 16))
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in [x] * served + [x[0]] * 36 + [x]:
            torch.testing.assert_close(fused(given), model(given))
    info = fused.kfconvert_info()
    assert info["switched_off"] == ([f"layers.{index}" for index in range(3)] if off else [])
    part = info["parts"]["layers.0"]
    assert (part["hits"], sum(part["misses"].values())) == ((0, 32) if off else (served + 1, 36))


class OneIsApart(Branching):
    """Takes a batch of one apart: doubles it, or leaves a layer out."""

    def __init__(self, doubles):
        super().__init__()
        self.doubles = doubles

    def forward(self, x):
        count = x.shape[0]
        if count == 1 and self.doubles:
            x = x.expand(2, -1, -1)
        first = 1 if count == 1 and not self.doubles else 0
        for layer in list(self.layers)[first:]:
            x = x + layer(x)
            if x.sum() > 1e9:
                break
        return x[:count]


@pytest.mark.parametrize("doubles", [True, False])
def test_an_example_of_one_that_is_taken_apart(doubles):
    model = OneIsApart(doubles)
    model.layers[0] = MLP(16) if doubles else nn.Sequential(MLP(16))  # in a group of its own
    fused, stats = convert(model, input_shape=(1, 5, 16))
    # Where one example leaves the first layer out, its program has served no example call.
    assert stats["total_replaced"] == (6 if doubles else 4)
    for batch in (1, 2, 3, 8):
        x = torch.randn(batch, 5, 16)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), type(model).forward(fused, x))
    assert not any(part["misses"] for part in fused.kfconvert_info()["parts"].values())


def test_a_part_whose_guard_costs_what_it_saves_is_left_alone(monkeypatch):
    def fused_one(selector, operators, medians, ratios):
        return Decision(next(iter(ratios)), None)

    monkeypatch.setattr("kfconvert.conversion.selector.Selector._fastest", fused_one)
    slower = "it takes 3.0 us, the original 2.0 us"
    monkeypatch.setattr("kfconvert.conversion.selector.Selector.slower", lambda *calls: slower)
    converter = ModelConverter()
    with pytest.warns(UserWarning, match="fused nothing"):
        fused = converter.convert_model(Branching(), input_shape=(64, 50, 16))
    stats, x = converter.conversion_stats, torch.randn(2, 5, 16)
    assert not stats["total_replaced"] and stats["total_found"]
    assert all("with the guard of layers.0" in site["reason"] for site in stats["sites"])
    with torch.no_grad():
        torch.testing.assert_close(fused(x), type(fused).forward(fused, x))


def seq2seq(kind):
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("kind, length", [("t5", 7), ("bart", 12)])
def test_the_lengths_of_an_encoder_and_its_decoder_are_free(kind, length):
    """Whatever they are in the example: of a decoder that is shorter, and equal by chance."""
    model, ids = seq2seq(kind), torch.randint(3, 64, (2, 30))

    def call(encoded, decoded):
        masked = {"input_ids": ids[:, :encoded].clone(), "attention_mask": torch.ones(2, encoded, dtype=torch.long)}
        return {**masked, "decoder_input_ids": ids[:, :decoded].clone(), "use_cache": False}

    fused, stats = convert(model, example_inputs=call(12, length))
    assert stats["total_replaced"] > 0 and stats["regions"][0]["captured"]
    with torch.no_grad():
        for encoded, decoded in ((12, length), (12, 5), (5, 1), (9, 20)):
            arguments = call(encoded, decoded)
            torch.testing.assert_close(fused(**arguments).logits, model(**arguments).logits)
    info = fused.kfconvert_info()
    assert info["guard"]["misses"] == {} and [part["misses"] for part in info["parts"].values() if part["misses"]] == []


def test_two_arguments_of_one_length_that_only_looks_like_one_are_told_apart():
    class Head(MLP):
        def forward(self, a, b):
            return super().forward(a.mean(1, keepdim=True) + b)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = MLP(), MLP(), Head()

        def forward(self, a, b):
            left, right = self.left(a), self.right(b)
            return left if left.sum() > 1e9 else self.head(left, right)

    model = Pair()
    fused, _ = convert(model, example_inputs=(torch.randn(2, 6, 16), torch.randn(2, 6, 16)))
    with torch.no_grad():
        for left, right in ((6, 6), (3, 9), (9, 3), (1, 2)):
            a, b = torch.randn(2, left, 16), torch.randn(2, right, 16)
            torch.testing.assert_close(fused(a, b), model(a, b))
    assert all(part["misses"] == {} and part["hits"] == 4 for part in fused.kfconvert_info()["parts"].values())


class Tied(nn.Module):
    """Its two layers with one weight are parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        y = torch.relu(self.first(x))
        return x if y.sum() > 1e9 else torch.relu(self.second(y))


def test_weights_of_parts_may_be_untied():
    x, model = torch.randn(3, 16), Tied().eval()
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=x)
    other = torch.randn(16, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        for each in (model, fused):
            each.second.weight = nn.Parameter(other)
        torch.testing.assert_close(fused(x), model(x))
    assert {path: part["hits"] for path, part in fused.kfconvert_info()["parts"].items()} == {"first": 2, "second": 2}
