"""Weights of projections as blocks of one tensor: outputs follow them, no memory is taken, and files are as before."""

import copy
import gc
import io
import warnings

import numpy
import pytest
import torch
import transformers
from safetensors.torch import save_file, save_model
from support import small_models
from support.state_changes import assert_close
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import kfconvert
from kfconvert.conversion.timing import Timings
from kfconvert.profiling.comparison import Comparison
from kfconvert.runtime import merge, separate, whole

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 64


class Projections(nn.Module):
    """Attention's projections and a gated block. (batch, 64) -> (batch, 64)"""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, n, bias=n > 32) for n in (WIDTH, 32, 32))
        self.gate, self.up = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        x = x + query.cos() * torch.cat([key.sin(), value.cos()], -1)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def projections() -> nn.Module:
    torch.manual_seed(0)
    return Projections().eval()


def x(seed=0, batch=3):
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))


def groups(model):
    return [[model.query.weight, model.key.weight, model.value.weight], [model.gate.weight, model.up.weight]]


def merged(model) -> int:
    return sum(whole(weights) is not None for weights in groups(model))


def converted(model=None, **options) -> nn.Module:
    model = projections() if model is None else model
    return small_models.convert(model, example_inputs=x(), validate_accuracy=False, **options)


def bytes_held() -> int:
    """Bytes of host memory in which tensors of this process lie; what several of them share counts once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what libraries deprecate, when it is looked at
        found = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu"]
        found = [t for t in found if t.layout is torch.strided]  # other tests may have left sparse ones
    spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in found)})
    total, end = 0, 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def of_model(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


# The functions


def layers(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.randn(size, 16).to(dtype)) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_merged_weights_are_blocks_of_one_tensor(dtype):
    weights = layers(4, 8, 2, dtype=dtype)
    values, ids = [w.detach().clone() for w in weights], list(map(id, weights))
    assert whole(weights) is None
    old = merge(weights)
    assert [torch.equal(o, v) for o, v in zip(old, values, strict=True)] == [True] * 3
    found = whole(weights)
    assert torch.equal(found, torch.cat(values)) and list(map(id, weights)) == ids
    assert all(torch.equal(w, v) and w.requires_grad and w.is_leaf for w, v in zip(weights, values))
    assert merge(weights) == [] and whole(weights).data_ptr() == found.data_ptr()
    assert torch.equal(whole(weights[1:]), torch.cat(values[1:]))
    assert whole(weights[::-1]) is None and whole([*weights, weights[0]]) is None and whole(weights[::2]) is None
    with torch.no_grad():
        weights[1].mul_(2)
    assert torch.equal(found[4:12], values[1] * 2) and [w._version for w in weights] == [0, 1, 0]
    assert [w.untyped_storage().nbytes() for w in weights] == [w.numel() * w.itemsize for w in weights]


def test_separated_weights_have_memory_of_their_own_again():
    weights = layers(4, 8)
    values = [w.detach().clone() for w in weights]
    merge(weights)
    separate([*weights, nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2).to_sparse())])
    assert whole(weights) is None and all(map(torch.equal, weights, values))
    assert all(w.untyped_storage().resizable() for w in weights) and merge(weights)


def shared_with_an_array():
    array = numpy.ones((4, 16), "float32")
    return nn.Parameter(torch.from_numpy(array)), array


def kept(view):
    parameter = nn.Parameter(torch.randn(4, 16))
    return parameter, view(parameter)


def shared_with_processes():
    parameter = nn.Parameter(torch.randn(4, 16))
    parameter.share_memory_()
    return parameter, None


NOT_MOVED = {
    "an array": shared_with_an_array,
    "another tensor": lambda: kept(lambda p: p.detach()),
    "a storage": lambda: kept(lambda p: p.untyped_storage()),
    "other processes": shared_with_processes,
    "transposed": lambda: (nn.Parameter(torch.randn(16, 4).t()), None),
    "not aligned": lambda: (nn.Parameter(torch.randn(3, 5)), None),
    "another dtype": lambda: (nn.Parameter(torch.randn(4, 16).double()), None),
    "a subclass": lambda: (nn.Parameter(torch.randn(4, 16).as_subclass(type("Own", (torch.Tensor,), {}))), None),
    "sparse": lambda: (nn.Parameter(torch.ones(4, 16).to_sparse()), None),
}


@pytest.mark.parametrize("kind", NOT_MOVED)
def test_what_somebody_else_refers_to_stays_where_it_is(kind):
    special, holder = NOT_MOVED[kind]()
    [plain] = layers(4)
    weights = [special, plain] if kind in ("another dtype", "other columns") else [plain, special]
    places = [w.data_ptr() if w.layout is torch.strided else None for w in weights]
    assert merge(weights) is None
    assert [w.data_ptr() if w.layout is torch.strided else None for w in weights] == places
    del holder


# Conversions


def test_a_converted_model_takes_no_more_memory():
    model, before = projections(), bytes_held()
    parameters, places = dict(model.named_parameters()), [p.data_ptr() for p in model.parameters()]
    fused = converted(model, inplace=True)
    assert fused is model and merged(model) == 2
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert places != [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        for batch in (3, 4, 3):
            model(x(batch=batch))
    assert small_models.guard(model)["hits"] == 3
    # Besides the weights there are two biases below each other.
    assert bytes_held() - before <= 0.03 * of_model(model)


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [False, True])
def test_a_converted_model_takes_no_more_memory_on_a_gpu(graphs):
    model, inputs = projections().half().cuda(), x().half().cuda()
    original = copy.deepcopy(model)
    converter = kfconvert.ModelConverter(validate_accuracy=False, select="all", cuda_graphs=graphs)
    with torch.no_grad():
        converter.convert_model(copy.deepcopy(model), example_inputs=inputs)(inputs)  # workspaces of libraries stay
    gc.collect()
    before = torch.cuda.memory_allocated()
    fused = converter.convert_model(model, example_inputs=inputs, inplace=True)
    assert merged(fused) == 2
    for step in range(4):
        with torch.no_grad():
            assert_close(fused(inputs).cpu(), original(inputs).cpu(), f"call {step}")
            for each in (fused, original):
                each.key.weight.mul_(-2)
    if not graphs:
        gc.collect()
        assert torch.cuda.memory_allocated() - before <= 0.03 * of_model(model) + 2**16
    assert size(lambda file: torch.save(fused.state_dict(), file)) <= size(
        lambda file: torch.save(original.state_dict(), file)
    )


def test_the_model_that_was_passed_in_is_not_touched():
    model = projections()
    places = [p.data_ptr() for p in model.parameters()]
    fused = converted(model)
    assert merged(fused) == 2 and merged(model) == 0 and places == [p.data_ptr() for p in model.parameters()]


def test_a_model_that_is_given_back_has_its_weights_as_they_were(monkeypatch):
    slower = Timings(Comparison({"original": [1.0] * 9, "converted": [2.0] * 9}), [])
    monkeypatch.setattr("kfconvert.conversion.pipeline.time", lambda *arguments: slower)
    converter, model = kfconvert.ModelConverter(), projections()
    wanted = model(x())
    fused = converter.convert_model(model, example_inputs=x(), inplace=True)
    assert converter.conversion_stats["reverted"] and merged(fused) == 0
    assert converter.conversion_stats["memory"]["derived"] == 0
    assert all(p.untyped_storage().resizable() for p in fused.parameters())
    assert_close(fused(x()), wanted, "given back")


def test_an_optimizer_made_before_the_conversion_trains_on():
    both, seeds = [projections(), projections()], range(3)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in both]
    fused = converted(both[0], inplace=True)
    for seed in seeds:
        for model, optimizer in zip((fused, both[1]), optimizers):
            model.train()
            optimizer.zero_grad()
            model(x(seed)).square().sum().backward()
            optimizer.step()
            model.eval()
        assert merged(fused) == 2
        with torch.no_grad():
            assert_close(fused(x(seed)), both[1](x(seed)), f"after step {seed}")


# What becomes of the memory of the weights; False where they have memory of their own afterwards, and are copied.
def _within(function):
    def apply(model):
        with torch.no_grad():
            function(model)
        return model

    return apply


def _loaded(assign):
    state = {name: p.detach() * -1.5 for name, p in projections().state_dict().items()}
    return lambda model: (model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign), model)[1]


def _swapped(model):
    torch.utils.swap_tensors(model.key.weight, nn.Parameter(torch.ones(32, WIDTH)))
    return model


def _given(name, make):
    def apply(model):
        setattr(model.get_submodule(name), "weight", make(model))
        return model

    return apply


STATE_CHANGES = {
    "nothing": (lambda model: model, 2),
    "in place": (_within(lambda m: m.key.weight.mul_(-2)), 2),
    "load_state_dict that assigns": (_loaded(assign=True), 0),
    "to and from double": (lambda model: model.double().float(), 0),
    "data of one": (lambda m: (setattr(m.key.weight, "data", m.key.weight.data * -1.5), m)[1], 1),
    "a replaced one": (_given("up", lambda m: nn.Parameter(torch.ones(128, WIDTH))), 1),
    "a tied one": (_given("up", lambda m: m.gate.weight), 1),
    "swap_tensors": (_swapped, 1),
}


def test_a_conversion_in_place_frees_the_previous_memory():
    model = projections()
    before = [StorageWeakRef(weight.untyped_storage()) for group in groups(model) for weight in group]
    freed = []

    def progress(stage, done, total):
        if stage == "memory":
            freed.append(all(each.expired() for each in before))

    converter = kfconvert.ModelConverter(select="all", validate_accuracy=False)
    converter.convert_model(model, example_inputs=x(), inplace=True, progress=progress)
    assert merged(model) == 2 and freed and all(freed)


@pytest.fixture(scope="module")
def fused_once():
    return converted()


@pytest.mark.parametrize("change", STATE_CHANGES)
def test_outputs_follow_every_change_of_the_weights(change, fused_once):
    apply, still = STATE_CHANGES[change]
    original, fused = projections(), copy.deepcopy(fused_once)
    for weights in groups(fused):  # a copy has separate weights
        merge(weights)
    for model in (original, fused):
        with torch.no_grad():
            model(x())
    original, fused = apply(original), apply(fused)
    assert merged(fused) == still
    for step in range(2):
        with torch.no_grad():
            assert_close(fused(x(step)), original(x(step)), change)
        for model in (original, fused):
            model.zero_grad()
            model(x(step)).square().sum().backward()
        pairs = list(zip(fused.parameters(), original.parameters(), strict=True))
        assert_close([p.grad for p, _ in pairs], [p.grad for _, p in pairs], f"{change}: gradients")
        with torch.no_grad():
            for model in (original, fused):
                model.value.weight.mul_(-1.5), model.gate.weight.sub_(0.25)


# Files


def size(write) -> int:
    buffer = io.BytesIO()
    write(buffer)
    return len(buffer.getvalue())


@pytest.fixture(scope="module")
def llamas() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=100, use_cache=False)
    model = transformers.LlamaForCausalLM(config).eval()
    fused = small_models.convert(model, example_inputs={"input_ids": torch.arange(24).reshape(2, 12)})
    for layer in fused.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert whole([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]) is not None
        assert whole([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
    return model, fused


def file_of(path):
    return next(path.glob("*.safetensors")) if path.is_dir() else path


FILES = {
    "save_file": lambda m, path: save_file(m.state_dict(), path),
    "save_model": lambda m, path: save_model(m, path),
    "save_pretrained": lambda m, path: m.save_pretrained(path),
}


@pytest.mark.parametrize("writer", FILES)
def test_safetensors_are_the_same(llamas, writer, tmp_path):
    contents = []
    for name, model in zip(("original", "fused"), llamas):
        FILES[writer](model, tmp_path / name)
        contents.append(file_of(tmp_path / name).read_bytes())
    assert contents[0] == contents[1]


def test_an_artifact_is_as_large_as_the_weights_and_is_merged_when_it_is_loaded(llamas, tmp_path):
    model, fused = llamas
    folder = kfconvert.save(fused, tmp_path / "saved")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    sizes = [file.stat().st_size for file in (folder / "model.safetensors", tmp_path / "plain.safetensors")]
    assert sizes[0] <= sizes[1] + 64
    loaded = kfconvert.load(folder, model=copy.deepcopy(model))
    attention = loaded.model.layers[0].self_attn
    assert whole([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]) is not None
    ids = torch.arange(36).reshape(3, 12)
    with torch.no_grad():
        assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, "loaded")
