"""Models that generate are loaded without a trace: the graphs of their calls with key-value caches are kept as well."""

import copy
import functools
import json
import operator

import pytest
import torch
import transformers as hf
from support.artifacts import rewrite_graphs
from support.devices import DEVICES
from support.selection import exhaustive

import kfconvert.artifact.replay
import kfconvert.conversion.pipeline
from kfconvert.artifact import files as artifact
from kfconvert.artifact import saving
from kfconvert.converter import ModelConverter
from kfconvert.inputs import Reader, Writer, build, described, taken_apart
from kfconvert.inputs.static_cache import as_static

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=12)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    ),
}
IDS = torch.arange(3, 15).reshape(2, 6)


@pytest.fixture(autouse=True)
def steps_on_the_cpu(monkeypatch):
    """As on a GPU, but for the recordings."""
    for module in (kfconvert.conversion.pipeline, kfconvert.artifact.replay):
        monkeypatch.setattr(module, "can_record", lambda device: True)


def inputs_of(family, device="cpu"):
    ids = IDS.to(device)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :3]} if family == "t5" else {"input_ids": ids}


@functools.cache
def converted(family, device="cpu"):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval().to(device)
    converter = ModelConverter(select="all", effort="fast", new_tokens=0)
    return converter.convert_model(model, example_inputs=inputs_of(family, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["mistral", *exhaustive("t5")])
def test_a_model_that_generates_is_not_traced(tmp_path, traces, family, device):
    fused, ids = converted(family, device), IDS.to(device)
    assert fused.kfconvert_info()["generates"]
    hits = fused.kfconvert_info()["guard"]["hits"]
    path = saving.save(fused, tmp_path / "saved")
    traces.clear()
    loaded = artifact.load(path)
    assert not traces
    for key in ("regions", "sites", "dynamic", "generates"):
        assert loaded.kfconvert_info()[key] == fused.kfconvert_info()[key]
    tokens = [model.generate(ids, max_new_tokens=14, do_sample=False) for model in (fused, loaded)]
    assert torch.equal(*tokens)
    guard = loaded.kfconvert_info()["guard"]
    assert not guard["misses"] and 0 < guard["hits"] == fused.kfconvert_info()["guard"]["hits"] - hits
    with torch.no_grad():
        (ours, form), (theirs, other) = (taken_apart(model(**inputs_of(family, device))) for model in (loaded, fused))
    assert form == other and all(map(torch.equal, ours, theirs))
    # Where the graphs are not there, the same calls are traced again as were captured then.
    rewrite_graphs(path, None)
    again = artifact.load(path)
    assert traces and again.kfconvert_info()["regions"] == fused.kfconvert_info()["regions"]
    assert torch.equal(again.generate(ids, max_new_tokens=14, do_sample=False), tokens[0])


@pytest.fixture(scope="module")
def caches():
    """Caches of each class and layer, filled and empty."""
    torch.manual_seed(0)
    filled = {}
    with torch.no_grad():
        for family, make in FAMILIES.items():
            filled[family] = make().eval()(**inputs_of(family), use_cache=True).past_key_values
    return [*filled.values(), hf.DynamicCache(), hf.DynamicCache(config=hf.MistralConfig(**SIZES, sliding_window=12))]


def test_a_static_cache_has_the_tokens_of_another_cache_and_the_tensors_that_are_written(caches):
    cache = as_static(caches[0], torch.tensor(6), 3)
    tensors, form = taken_apart(cache)
    held = [tensor for layer in caches[0].layers for tensor in (layer.keys, layer.values)]
    assert all(torch.equal(ours[:, :, :6], theirs) for ours, theirs in zip(tensors[1:], held, strict=True))
    written = [tensor + 1 for tensor in tensors]
    form.caches[0].write(cache, written)
    assert all(map(operator.is_, taken_apart(cache)[0], written)) and cache.get_seq_length() is written[0]
    assert Reader().made(Writer().stored(form.caches[0])) == form.caches[0]


def test_caches_and_records_as_json(caches):
    record = hf.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(2, 3))
    for value in (*caches, record):
        spec = json.loads(json.dumps(described({"given": value}), allow_nan=False))
        built = build(spec)["given"]
        assert type(built) is type(value)
        (ours, form), (theirs, other) = taken_apart(built), taken_apart(value)
        assert form == other and [x.shape for x in ours] == [x.shape for x in theirs]
    kinds = [kind for cache in caches for kind in taken_apart(cache)[1].caches.values()]
    assert len(kinds) == len(caches) and all(Reader().made(Writer().stored(kind)) == kind for kind in kinds)


def test_caches_of_other_classes_are_not_told(caches):
    class Own(hf.cache_utils.DynamicLayer):
        pass

    cache = copy.deepcopy(caches[0])
    cache.layers[0].__class__ = Own
    assert described({"cache": cache}) is None
