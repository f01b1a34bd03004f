"""Weights that torchao has quantized."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.artifacts import contents, refusal, rewrite
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import kfconvert
from kfconvert import ModelConverter
from kfconvert.artifact.quantized import flattened, is_same_quantized, tuples_in, unflattened, unstorable_wrapper
from kfconvert.artifact.tensor_files import read_tensors, write_tensors

quantization = pytest.importorskip("torchao.quantization")
safetensors_support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")

INT8 = quantization.Int8WeightOnlyConfig
BY_GROUPS = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}
CONFIGS = {
    "int8": INT8,
    "int8 activations": quantization.Int8DynamicActivationInt8WeightConfig,
    "fp8": quantization.Float8WeightOnlyConfig,
    "int4": lambda: quantization.IntxWeightOnlyConfig(**BY_GROUPS),
}
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """(..., 64) -> (..., 64)"""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.down = nn.LayerNorm(64), nn.Linear(64, 128, False), nn.Linear(128, 64, False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(self.norm(x))))


def quantized(model, config):
    quantization.quantize_(model.eval(), config)
    return model


def converted(model, **example):
    return ModelConverter(select="all", effort="fast").convert_model(model, **example)


@pytest.fixture(scope="module")
def fused():
    return converted(quantized(Net(), INT8()), example_inputs=X)


@pytest.fixture(scope="module")
def saved(fused, tmp_path_factory):
    return kfconvert.save(fused, tmp_path_factory.mktemp("saved") / "net")


def is_equal(value, other):
    same = torch.equal if type(value) in (torch.Tensor, nn.Parameter) else is_same_quantized
    return type(value) is type(other) and value.requires_grad == other.requires_grad and same(value, other)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_loaded_model_is_the_saved_one(kind, dtype, tmp_path, traces):
    x = X.to(dtype)
    fused = converted(quantized(Net().to(dtype), CONFIGS[kind]()), example_inputs=x)
    kfconvert.save(fused, tmp_path / "net")
    traces.clear()
    again = kfconvert.load(tmp_path / "net", model=Net(), device="cpu")
    assert torch.equal(again(x), fused(x)) and not traces
    state = fused.state_dict(keep_vars=True)
    assert state.keys() == again.state_dict().keys()
    assert all(is_equal(value, state[key]) for key, value in again.state_dict(keep_vars=True).items())

    other = quantized(Net().to(dtype), CONFIGS[kind]()).state_dict()
    for each in (again, fused):
        each.load_state_dict(other)
    assert torch.equal(again(x), fused(x)) and not again.kfconvert_info()["guard"]["misses"]
    assert torch.equal(again.train()(x), fused.train()(x))  # the original forwards


def test_the_file_has_the_format_of_torchao(fused, saved):
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    state, rest = safetensors_support.unflatten_tensor_state_dict(load_file(saved / "model.safetensors"), metadata)
    assert not rest and state.keys() == fused.state_dict().keys()
    assert is_same_quantized(state["gate.weight"], fused.gate.weight)


def tensors():
    """Weights that a CPU can construct, also of kinds that only a GPU runs."""
    of_rows = quantization.PerRow()
    kinds = sys.modules["torchao.quantization.quantize_.workflows"]
    scales = {"scale": torch.rand(2, 64).bfloat16(), "zero_point": torch.rand(2, 64).bfloat16()}
    numbers = torch.randint(0, 255, (64, 32), dtype=torch.uint8)
    return {
        "fp8 activations": kinds.Float8Tensor.from_hp(
            torch.randn(64, 64), granularity=of_rows, act_quant_kwargs=kinds.QuantizeTensorToFloat8Kwargs(None, of_rows)
        ),
        "packed int4": kinds.Int4Tensor(numbers, **scales, block_size=(1, 32), shape=torch.Size((64, 64))),
    }


@pytest.mark.parametrize("kind", tensors())
def test_weights_for_other_devices(kind):
    state = {"weight": tensors()[kind], "bias": torch.ones(2)}
    assert unstorable_wrapper(state["weight"]) is None
    again = unflattened(*flattened(state), tuples_in(state), torch.device("cpu"))
    assert again.keys() == state.keys() and is_same_quantized(again["weight"], state["weight"])


def llama(**options):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=1, pad_token_id=0, **sizes, **options))


@torch.no_grad()
def test_a_language_model_with_a_tied_head_needs_no_model(tmp_path, traces):
    fused = converted(quantized(llama(tie_word_embeddings=True), INT8()), input_shape=(1, 16))
    kfconvert.save(fused, tmp_path / "net")
    traces.clear()
    again, ids = kfconvert.load(tmp_path / "net"), torch.arange(1, 9)[None]
    assert not traces and type(again.lm_head.weight) is not type(again.model.embed_tokens.weight) is nn.Parameter
    tokens = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (fused, again)]
    assert torch.equal(*tokens) and torch.equal(again(ids).logits, fused(ids).logits)
    assert not again.kfconvert_info()["guard"]["misses"]


@torch.no_grad()
def test_folders_of_transformers(tmp_path):
    original = llama().eval()
    original.save_pretrained(tmp_path / "original")
    asked = {"quantization_config": TorchAoConfig(INT8())}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", **asked)
    fused = converted(model, input_shape=(1, 16))
    kfconvert.save(fused, tmp_path / "saved")
    with pytest.warns(UserWarning, match="kfconvert.load will need model="):
        fused.save_pretrained(tmp_path / "pretrained", max_shard_size="50KB")
    ids = torch.arange(1, 9)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(plain(ids).logits, model(ids).logits)
    again = kfconvert.load(tmp_path / "pretrained", model=original)
    assert torch.equal(again(ids).logits, fused(ids).logits)


def test_ties_of_quantized_weights_are_kept(tmp_path):
    def tied(model):
        model[3].weight = model[1].weight
        return model

    def net():
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))

    fused = converted(tied(quantized(net(), INT8())), example_inputs=X)
    kfconvert.save(fused, tmp_path / "net")
    again = kfconvert.load(tmp_path / "net", model=tied(net()))
    assert again[1].weight is again[3].weight
    again = kfconvert.load(tmp_path / "net", model=net())
    assert again[1].weight is not again[3].weight


def test_weights_that_torchao_cannot_store_are_refused(fused, tmp_path):
    kinds = sys.modules["torchao.quantization.quantize_.workflows"]
    of_blocks = quantization.PerBlock([32, 32])
    weights = {
        "is a Float8Tensor that torchao cannot store: Failed to find class PerBlock": kinds.Float8Tensor.from_hp(
            torch.randn(128, 64),
            granularity=of_blocks,
            act_quant_kwargs=kinds.QuantizeTensorToFloat8Kwargs(None, of_blocks),
        ),
        "has a tensor 'qdata' that is not contiguous": kinds.Float8Tensor.from_hp(torch.randn(64, 128)).t(),
    }
    own = fused.gate.weight
    try:
        for reason, weight in weights.items():
            fused.gate.weight = nn.Parameter(weight, requires_grad=False)
            with pytest.raises(kfconvert.ArtifactError, match=f"the state 'gate.weight' {reason}") as caught:
                kfconvert.save(fused, tmp_path / "net")
            assert "\n" not in str(caught.value) and not any(tmp_path.iterdir())
    finally:
        fused.gate.weight = own


def changed(path, change):
    """Applies ``change`` to the tensors and the description of ``gate.weight``, with new checksums."""
    tensors, metadata = read_tensors(path / "model.safetensors")
    tensors = {key: value.clone() for key, value in tensors.items()}
    described = json.loads(metadata["gate.weight"])
    change(tensors, described)
    write_tensors(tensors, path / "model.safetensors", metadata | {"gate.weight": json.dumps(described)})
    rewrite(path)


CHANGES = {
    "has the class Linear, which is not a quantized": lambda tensors, described: described.update(_type="Linear"),
    "has the class PerRow, which is not a quantized": lambda tensors, described: described.update(_type="PerRow"),
    "gate._weight_scale is missing": lambda tensors, described: tensors.pop("gate._weight_scale"),
    "do not fit Net: Unexpected key.*gate._weight_more": lambda tensors, _: tensors.update(
        {"gate._weight_more": torch.ones(1)}
    ),
    "do not fit Net: size mismatch for gate.weight": lambda tensors, _: tensors.update(
        {"gate._weight_qdata": torch.ones(128, 32, dtype=torch.int8)}
    ),
    "Failed to create instance of Int8Tensor": lambda tensors, described: described["_data"].pop("dtype"),
    "Failed to find class system": lambda tensors, described: described["_data"].update(
        act_quant_kwargs={"_type": "system", "_data": {"command": "true"}}
    ),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_changed_weights_are_refused(reason, path):
    changed(path, CHANGES[reason])
    with pytest.raises(kfconvert.ArtifactError, match=reason) as caught:
        kfconvert.load(path, model=Net())
    assert "\n" not in str(caught.value)


def test_changed_records_are_refused(path):
    rewrite(path, quantized={"gate.weight": ["__class__"], "down.weight": []})
    assert "damaged" in refusal(path, model=Net())
    rewrite(path, quantized={"gate.weight": []})
    assert "do not fit" in refusal(path, model=Net())
    rewrite(path, quantized={"norm.weight": [], "gate.weight": [], "down.weight": []})
    assert "norm.weight has the class Tensor" in refusal(path, model=Net())


def test_a_damaged_file(path):
    content = bytearray(contents(path)["model.safetensors"])
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    assert "checksum" in refusal(path, model=Net())


def test_graphs_of_weights_with_other_settings_are_traced_again(path, traces, caplog):
    changed(path, lambda tensors, described: described["_data"].update(reduce_range=True))
    kfconvert.load(path, model=Net())
    assert traces and "the model, its code or the libraries changed" in caplog.text


def test_a_graph_reads_only_inner_tensors(path, traces, caplog):
    graphs = (path / "graphs.json").read_text()
    assert '"qdata"' in graphs
    (path / "graphs.json").write_text(graphs.replace('"qdata"', '"data"'))
    rewrite(path)
    kfconvert.load(path, model=Net())
    assert traces and "has no inner tensor 'data'" in caplog.text


def test_load_needs_torchao(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.prototype.safetensors", None)
    assert "quantized by torchao, which cannot be imported" in refusal(saved, model=Net())
