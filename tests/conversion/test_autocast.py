"""Models that are converted under autocast: casts in their graphs, copies of weights, and the calls that they serve."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICES
from support.selection import exhaustive
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

import kfconvert
from kfconvert import ArtifactError, ModelConverter
from kfconvert.capture.autocast import write_casts
from kfconvert.capture.tracer import trace
from kfconvert.inputs import ExampleCall
from kfconvert.region import LiveTensors
from kfconvert.torch_state import without_autocast

LOW = torch.bfloat16


def autocast(device="cpu", dtype=LOW):
    return torch.autocast(device, dtype)


class Of(nn.Module):
    """A module with a weight, a buffer and a ``function`` of an input, the module itself, and another input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.register_buffer("kept", torch.randn(4, 8))

    def forward(self, x, y):
        return self.function(x, self, y)


def blocks(x, m, y):
    with torch.autocast(x.device.type, enabled=False):
        y = (x.float() @ m.weight) * 2
        with torch.autocast(x.device.type, torch.float16):
            y = y @ y.transpose(1, 2)
    return F.linear(x, m.weight), y


def written(x, m, y):
    h = x * 2
    first = h @ m.weight
    h.add_(1)
    return first, h @ m.weight


FUNCTIONS = {
    "linear": lambda x, m, y: F.gelu(F.linear(x, m.weight, m.bias)),
    "a view of a weight": lambda x, m, y: x @ m.weight.t() + x @ m.weight.transpose(0, 1),
    "addmm": lambda x, m, y: torch.addmm(m.bias, x[0], m.weight),
    "a buffer": lambda x, m, y: x @ m.kept.T,
    "norms": lambda x, m, y: F.layer_norm(x, (8,), m.bias, m.bias) * F.softmax(F.linear(x, m.weight), -1),
    "attention": lambda x, m, y: F.scaled_dot_product_attention(x, F.linear(y, m.weight), y),
    "einsum": lambda x, m, y: torch.einsum("bij,bkj->bik", x, F.linear(y, m.weight)),
    "mixed dtypes": lambda x, m, y: torch.cat([x, F.linear(y, m.weight)])[:2] + torch.stack([y, y @ m.weight])[0],
    "a loss": lambda x, m, y: F.mse_loss(F.linear(x, m.weight), y),
    "sums": lambda x, m, y: (F.linear(x, m.weight).sum(-1), F.linear(y, m.weight).cumsum(0), x.norm()),
    "casts": lambda x, m, y: (x.half() @ m.weight, m.weight.to(LOW) + 1, F.linear(x, m.weight).float()),
    "float64": lambda x, m, y: x.double() @ m.weight.double() + y,
    "inner autocast": blocks,
    "a value that is written": written,
    "convolution": lambda x, m, y: F.conv1d(x, m.weight[:, :, None].narrow(1, 0, 5), m.bias),
}
UNLIKE = {"a view of a weight", "einsum", "mixed dtypes", "sums", "inner autocast", "a value that is written"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*sorted(UNLIKE), *exhaustive(*sorted(FUNCTIONS.keys() - UNLIKE))])
def test_the_graph_computes_what_autocast_computes(name, device):
    model, inputs = Of(FUNCTIONS[name]).eval().to(device), tuple(torch.randn(2, 5, 8, device=device) for _ in range(2))
    with torch.no_grad(), autocast(device):
        expected = model(*inputs)
        region = trace(model, ExampleCall(inputs))
        with without_autocast():
            flat = fx.Interpreter(region.root, graph=region.graph).run(*LiveTensors(model, region).arguments([*inputs]))
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert region.autocast == (device, LOW)
    for found, wanted in zip(flat, expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    weights = [node for node in region.graph.nodes if node.name in region.slots]
    casts = [node for node in region.graph.nodes if node.target is torch.ops.aten.to.dtype]
    if name != "casts":
        assert not [cast for cast in casts if cast.args[0] in weights and cast.args[1] is LOW]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU())


MODELS = {"attention": (Attention, (4, 9, 32)), "convolutions": (convolutions, (2, 3, 12, 12))}


def both(make, shape, device="cpu", **options):
    torch.manual_seed(0)
    model = make().eval().to(device)
    converter = ModelConverter(select="all", effort="fast", **options)
    with autocast(device):
        fused = converter.convert_model(model, shape)
    assert converter.conversion_stats["autocast"] == "bfloat16"
    assert converter.conversion_stats["total_replaced"]
    halves = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    assert converter.conversion_stats["memory"]["derived"] > halves
    return model, fused


@pytest.fixture(scope="module")
def pair():
    return both(*MODELS["attention"])


def called(model, x, dtype=LOW):
    with torch.no_grad(), autocast(x.device.type, dtype):
        return model(x)


def is_served(model, x):
    before = model.kfconvert_info()["guard"]["hits"]
    called(model, x)
    return model.kfconvert_info()["guard"]["hits"] == before + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_calls_under_autocast_run_fused_and_are_as_accurate(name, device):
    make, shape = MODELS[name]
    model, fused = both(make, shape, device)
    for rows in (shape[0], 3):
        x = torch.randn(rows, *shape[1:], device=device)
        exact = copy.deepcopy(model).double()(x.double())
        found, expected = called(fused, x), called(model, x)
        assert found.dtype == expected.dtype
        own = (expected - exact).abs().max()
        assert 0 < (found - exact).abs().max() <= 1.5 * own
    assert fused.kfconvert_info()["guard"] == {"hits": 2, "misses": {}}


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_other_calls_run_the_original(pair):
    model, fused = pair
    fused, x = copy.deepcopy(fused), torch.randn(2, 9, 32)
    with torch.no_grad():
        assert torch.equal(fused(x), model(x))
    assert torch.equal(called(fused, x, torch.float16), called(model, x, torch.float16))
    with autocast():
        fused(x).sum().backward()
        model(x).sum().backward()
    assert torch.equal(fused.up.weight.grad, model.up.weight.grad)
    model.zero_grad()
    assert set(fused.kfconvert_info()["guard"]["misses"]) == {
        "autocast is off; at conversion it was bfloat16",
        "autocast is float16; at conversion it was bfloat16",
        "it was converted under autocast, and the call requires gradients",
    }
    assert is_served(fused, x)


def optimizer_step(model):
    model.up.weight.grad = torch.ones_like(model.up.weight)
    torch.optim.SGD([model.up.weight], lr=0.1).step()


CHANGES = {
    "in place": lambda model: model.up.weight.mul_(1.5),
    "an optimizer": optimizer_step,
    "data": lambda model: setattr(model.up.weight, "data", model.up.weight * 2),
    "a new parameter": lambda model: setattr(model.up, "weight", nn.Parameter(model.up.weight * 2)),
    "load_state_dict": lambda model: model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()}),
    "without a trace": lambda model: (
        model.up.weight.detach().numpy().__imul__(2),
        getattr(model, "kfconvert_refresh", list)(),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_cast_again(name, pair):
    model, fused = map(copy.deepcopy, pair)
    x = torch.randn(2, 9, 32)
    before = called(fused, x)
    for each in (model, fused):
        with torch.no_grad():
            CHANGES[name](each)
    assert is_served(fused, x)
    found, expected = called(fused, x), called(model, x)
    assert (before - expected).abs().max() > 5 * (found - expected).abs().max()
    assert is_served(pair[1], x)


def test_check_weights_finds_writes_without_a_trace():
    model, fused = both(*MODELS["attention"], check_weights=1)
    x = torch.randn(2, 9, 32)
    called(fused, x)
    for each in (model, fused):
        each.up.weight.detach().numpy()[:] *= 2
    torch.testing.assert_close(called(fused, x), called(model, x), rtol=0, atol=0.03)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_model_of_another_dtype_runs_the_original(pair):
    fused = copy.deepcopy(pair[1])
    fused.up.half()
    assert not is_served(fused, torch.randn(2, 9, 32))
    assert "a weight was moved, or replaced" in str(fused.kfconvert_info()["guard"]["misses"])


def copies_of(fused):
    """The addresses of the copies of weights that the programs read, for each program."""
    programs = [variant.program for variant in fused.__dict__["forward"].variants]
    return [{store[key].data_ptr() for _, (store, key), _ in program._casts._pairs} for program in programs]


@pytest.mark.parametrize("make", exhaustive("full"))
def test_call_forms_share_the_copies(make):
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    converter = ModelConverter(select="all", effort=make)
    with autocast():
        fused = converter.convert_model(BertModel(config).eval(), (2, 8))
    ids = torch.randint(2, 50, (2, 8))
    calls = {"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for call in (*calls, *calls):
        with torch.no_grad(), autocast():
            fused(**call)
    assert fused.kfconvert_info()["guard"] == {"hits": 4, "misses": {}}
    first, *others = copies_of(fused)
    assert others and all(first == other for other in others)


def test_copies_are_made_once(pair):
    fused, x = pair[1], torch.randn(2, 9, 32)
    called(fused, x)
    before = copies_of(fused)
    called(fused, x)
    assert copies_of(fused) == before and len(before[0]) == 8


@pytest.mark.exhaustive
def test_a_saved_model_is_loaded_for_the_same_autocast(pair, tmp_path):
    model, fused = pair
    kfconvert.save(fused, tmp_path)
    x = torch.randn(2, 9, 32)
    for context in (autocast(), without_autocast()):
        with context:
            loaded = kfconvert.load(tmp_path, model=Attention())
        assert is_served(loaded, x) and torch.equal(called(loaded, x), called(fused, x))


def test_frozen_models_run_under_autocast(pair):
    frozen, x = kfconvert.freeze(copy.deepcopy(pair[1])), torch.randn(2, 9, 32)
    assert is_served(frozen, x) and torch.equal(called(frozen, x), called(pair[1], x))


def test_a_program_with_casts_is_not_exported(pair):
    with pytest.raises(ArtifactError, match=r"it was converted under autocast|autocast is off"):
        kfconvert.export(pair[1], (torch.randn(2, 9, 32),))


@pytest.mark.parametrize("masked", exhaustive(False, True))
def test_generate_runs_fused_under_autocast(masked):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(2, 50, (2, 8))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_scores": True}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(prompt) if masked else None}
    with autocast():
        fused = ModelConverter(select="all").convert_model(model, (2, 8))
        found, expected = (each.generate(prompt, **options) for each in (fused, model))
    assert fused.kfconvert_info()["guard"]["hits"] == 6 and not fused.kfconvert_info()["guard"]["misses"]
    torch.testing.assert_close(found.scores[0], expected.scores[0], rtol=0, atol=0.02)


ATEN, HALF, FULL = torch.ops.aten, torch.float16, torch.float32
# Calls of operators, and the dtypes of their tensors under autocast to float16 on a GPU. "half" is a float16 tensor.
ON_CUDA = {
    "linear": (ATEN.linear.default, ("x", "weight", "weight"), [HALF] * 3),
    "einsum": (ATEN.einsum.default, ("ij,jk->ik", ["x", "half"]), [HALF] * 2),
    "layer_norm": (ATEN.layer_norm.default, ("half", [8, 8], "weight"), [FULL] * 2),
    "softmax": (ATEN.softmax.int, ("half", -1), [FULL]),
    "sum": (ATEN.sum.dim_IntList, ("half", [-1]), [FULL]),
    "pow": (ATEN.pow.Tensor_Scalar, ("half", 2), [FULL]),
    "cat": (ATEN.cat.default, (["x", "half"],), [FULL, HALF]),
    "gelu": (ATEN.gelu.default, ("half",), [HALF]),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_casts_on_a_gpu_are_found_by_fake_tensors(name):
    operator, arguments, expected = ON_CUDA[name]
    graph, mode, values = fx.Graph(), FakeTensorMode(), {}
    for each, dtype in {"x": FULL, "weight": FULL, "half": HALF}.items():
        values[each] = graph.placeholder(each)
        with mode:
            values[each].meta["val"] = torch.empty(8, 8, device="cuda", dtype=dtype)
    node = graph.call_function(operator, fx.node.map_aggregate(arguments, lambda each: values.get(each, each)))
    graph.output((node,))
    region = SimpleNamespace(
        graph=graph, slots={"weight": ("", "weight")}, casted={}, autocast=("cuda", HALF), inner=()
    )
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", HALF)
    try:
        with mode, torch.no_grad():
            node.meta["val"] = operator(*fx.node.map_arg(node.args, lambda each: each.meta["val"]))
        write_casts(region)
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    call = next(each for each in region.graph.nodes if each.target is operator)
    found = [each.meta["val"].dtype for each in tree_leaves(call.args) if isinstance(each, fx.Node)]
    assert found == expected
    assert ("weight" in arguments and HALF in expected) == bool(region.casted)
