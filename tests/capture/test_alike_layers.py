"""A graph with repeated layers equals the graph of all traced layers."""

from unittest import mock

import pytest
import torch
import torchvision
import transformers
from support.selection import exhaustive
from torch import fx, nn

from kfconvert.capture import alike_layers, captured
from kfconvert.capture.tracer import free_dimensions
from kfconvert.inputs import ExampleCall
from kfconvert.region import CaptureError

LAYERS = 8
SIZES = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 40,
}  # fmt: skip
MIXTRAL = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": LAYERS, "vocab_size": 40}
QWEN3 = {**SIZES, "head_dim": 8, "num_key_value_heads": 2}
GEMMA3 = {**QWEN3, "sliding_window": 16, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2}


@pytest.fixture
def of_libraries(monkeypatch):
    """The models of this file count as those of libraries."""
    monkeypatch.setattr(alike_layers, "is_of_libraries", lambda model: True)


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.linear, self.norm = number, nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, scale):
        return x + self.linear(self.norm(x)).relu() * scale


class Stack(nn.Module):
    """``special``: the number of a layer that its code treats in another way."""

    def __init__(self, special=None, layers=LAYERS):
        super().__init__()
        self.first, self.blocks, self.special = nn.Linear(8, 8), nn.ModuleList(map(Block, range(layers))), special

    def forward(self, x):
        x, kept = self.first(x), []
        scale = x.mean(-1, keepdim=True).sigmoid()
        for number, block in enumerate(self.blocks):
            x = block(x, scale)
            kept.append(x)
            if number == self.special:
                x = x.tanh()
        return self.outputs(x, kept)

    def outputs(self, x, kept):
        return x.softmax(-1)


class Returning(Stack):
    def outputs(self, x, kept):
        return [x.softmax(-1), *kept]


class Summing(Stack):
    def outputs(self, x, kept):
        return sum(kept)


def resnet():
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, LAYERS, 1, 1], num_classes=5)


def with_other_attribute():
    model = Stack()
    model.blocks[5].norm.eps = 1e-3
    return model


def with_shared_weight():
    model = Stack()
    model.blocks[5].linear.weight = model.blocks[1].linear.weight
    return model


def with_values_by_layer():
    model = Stack()
    model.factors = [1.0] * (LAYERS - 1) + [2.0]
    return model


class Gated(Block):
    def __init__(self, number):
        super().__init__(number)
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x, scale):
        return x + self.gate * self.linear(x)


def of(*kinds):
    model = Stack()
    model.blocks = nn.ModuleList(kinds[number % len(kinds)](number) for number in range(LAYERS))
    return model


def cache():
    found = transformers.DynamicCache()
    for layer in range(LAYERS):
        found.update(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8), layer)
    return found


X = {"x": torch.randn(3, 5, 8)}
IDS = {"input_ids": torch.arange(24).reshape(2, 12)}
STEP = {"input_ids": torch.tensor([[3], [4]]), "past_key_values": cache()}
REPEATED = {
    "plain": (Stack, X),
    "two kinds": (lambda: of(Block, Gated), X),
    "two layers of a kind": (lambda: of(Gated, Block, Block), X),
    "gemma3": (lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA3)), IDS),
    "resnet": (resnet, {"x": torch.randn(2, 3, 16, 16)}),
    "mixtral": (lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)), IDS),
    "t5": (lambda: transformers.T5Model(transformers.T5Config(**T5)), {**IDS, "decoder_input_ids": IDS["input_ids"]}),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**SIZES)), IDS),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), IDS),
    "step of llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), STEP),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), IDS),
    "qwen3": (lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3)), IDS),
}


class Long(Block):
    def forward(self, x, scale):
        x = super().forward(x, scale)
        return x.tanh() if self.number > 5 and x.shape[1] > 32 else x


class Masked(Stack):
    """Its last layers have another scale, which is the same for short inputs."""

    def forward(self, x):
        x = self.first(x)
        scales = x.new_ones(x.shape[1], 1), (torch.arange(x.shape[1]) < 32).to(x.dtype)[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, scales[number > 5])
        return x


class Windowed(Stack):
    """Its last layers have a window, which is longer than short inputs."""

    def __init__(self):
        super().__init__()
        self.sliding_window = 64

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, 0.5 if number > 5 and x.shape[1] > self.sliding_window else 1.0)
        return x


def with_two_windows():
    model = Stack()
    model.window_size = [7, 7]
    return model


class Pair(Block):
    def forward(self, x, y):
        return self.linear(x).relu(), self.norm(x) + y


class OfTwo(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Pair, range(LAYERS)))

    def forward(self, x):
        y = x
        for number, block in enumerate(self.blocks):
            both = block(x, y)
            x, y = both if number < 6 else both[::-1]
        return x + y


class Prompted(Stack):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x + self.prompt if number == 6 else x, 1.0)
        return x


class FromTheEnd(Stack):
    """With gates of zero, all layers return the same."""

    def __init__(self):
        super().__init__()
        self.blocks = of(Gated).blocks

    def outputs(self, x, kept):
        return x.softmax(-1), kept[-2]


class Twice(Stack):
    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x, 1.0)
        return x


class Clamped(Block):
    """A branch on a value, in a late layer."""

    def forward(self, x, scale):
        x = super().forward(x, scale)
        return x.clamp(-1, 1) if self.number == 7 and x.abs().max() > 50 else x


class Final(Block):
    final = False

    def forward(self, x, scale):
        x = super().forward(x, scale)
        return x.tanh() if self.number == 7 and self.final else x


IN_FULL = {
    "few layers": (lambda: Stack(layers=5), X),
    "results of all layers": (Returning, X),
    "special in the code": (lambda: Stack(special=1), X),
    "sum of all layers": (Summing, X),
    "other attribute": (with_other_attribute, X),
    "shared weight": (with_shared_weight, X),
    "values by layer": (with_values_by_layer, X),
    "window by number": (Windowed, X),
    "window of several numbers": (with_two_windows, X),
    "next layer uses another result": (OfTwo, X),
    "branch on length": (lambda: of(Long), X),
    "scale of some layers": (Masked, X),
    "zeros between layers": (Prompted, X),
    "layer counted from the end": (FromTheEnd, X),
    "layers used twice": (Twice, X),
}


def region_of(model, inputs):
    """The captured region, and whether its layers are repeated."""
    call, repeated, repeat = ExampleCall((), inputs), [], captured.repeat

    def noted(*args):
        repeat(*args)
        repeated.append(args)

    with mock.patch.object(captured, "repeat", noted):
        region = captured.capture(model, "", call, [free_dimensions(model, call)]).region
    return region, bool(repeated)


def regions(name, cases):
    """The model, its region, whether layers of that are repeated, and the region with all layers traced."""
    torch.manual_seed(0)
    make, inputs = cases[name]
    model = make().eval()
    region, is_repeated = region_of(model, inputs)
    with mock.patch.object(captured, "stacks_of", lambda model: []):
        return model, region, is_repeated, region_of(model, inputs)[0]


def results(model, region, inputs):
    leaves = dict(zip(region.inputs, region.call.leaves((), inputs)))
    values = []
    for node in region.graph.find_nodes(op="placeholder"):
        if node.name in region.slots:
            path, name = region.slots[node.name]
            values.append(getattr(model.get_submodule(path), name))
        else:
            values.append(leaves[node.name] if node.name in leaves else region.constants[node.name])
    return fx.Interpreter(fx.GraphModule(region.root, region.graph)).run(*values)


SHORT = ["two kinds", "step of llama"]


@pytest.mark.parametrize("name", [*SHORT, *exhaustive(*(name for name in REPEATED if name not in SHORT))])
def test_graphs_equal(name, of_libraries):
    model, repeated, is_repeated, traced = regions(name, REPEATED)
    both = repeated, traced
    assert is_repeated
    assert repeated.slots.keys() == traced.slots.keys() and set(repeated.slots.values()) == set(traced.slots.values())
    assert repeated.inputs == traced.inputs and repeated.outputs == traced.outputs
    found = [[(node.target, _path(node)) for node in region.graph.nodes if node.op != "placeholder"] for region in both]
    assert found[0] == found[1]
    with torch.no_grad():
        found = [results(model, region, REPEATED[name][1]) for region in both]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def _path(node):
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


@pytest.mark.parametrize("name", [*list(IN_FULL)[:2], *exhaustive(*list(IN_FULL)[2:])])
def test_other_stacks_are_traced_in_full(name, of_libraries):
    _, region, is_repeated, traced = regions(name, IN_FULL)
    assert not is_repeated and len(region.graph.nodes) == len(traced.graph.nodes)


def test_a_special_layer_after_the_traced_ones_is_detected(of_libraries):
    """In a run of all layers, or if that is skipped, by its outputs."""
    model = Stack(special=6).eval()
    assert not region_of(model, X)[1]
    with mock.patch.object(captured, "run_alike", lambda model, call, stacks: stacks):
        region, was_repeated = region_of(model, X)
    assert was_repeated
    torch.testing.assert_close(results(model, region, X)[0], model(**X))


def test_a_branch_on_a_value_in_a_late_layer_is_refused(of_libraries):
    with pytest.raises(CaptureError, match="data-dependent"):
        region_of(of(Clamped).eval(), X)


def test_attributes_that_only_late_layers_read_are_known(of_libraries):
    region, is_repeated = region_of(of(Final).eval(), X)
    assert is_repeated and (Final, "final") in region.reads


def test_own_layers_are_traced_in_full():
    assert not region_of(Stack().eval(), X)[1]
