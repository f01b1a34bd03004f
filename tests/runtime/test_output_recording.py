"""What transformers records of submodules by hooks, while a call of the model runs around fused parts."""

import pytest
import torch
import transformers
from support.selection import exhaustive

from kfconvert import ModelConverter

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 32}
MODELS = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)),
    "gpt2": lambda: transformers.GPT2Model(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, use_cache=False)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=16, patch_size=4)),
}
RECORDED = {"output_attentions": "attentions", "output_hidden_states": "hidden_states"}


@pytest.fixture(scope="module", params=["gpt2", "vit", *exhaustive("bert", "llama")])
def pair(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    model.set_attn_implementation("eager")
    given = (
        {"pixel_values": torch.randn(2, 3, 16, 16)} if request.param == "vit" else {"input_ids": torch.arange(10)[None]}
    )
    return model, ModelConverter(select="all").convert_model(model, example_inputs=given), given


def assert_recorded(model, fused, given, name):
    with torch.no_grad():
        theirs, ours = getattr(model(**given), name), getattr(fused(**given), name)
    assert len(theirs) > 1
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("option", RECORDED)
def test_outputs_asked_for_in_the_call(pair, option):
    model, fused, given = pair
    assert_recorded(model, fused, {**given, option: True}, RECORDED[option])


@pytest.mark.parametrize("option", RECORDED)
def test_outputs_asked_for_in_the_configuration(pair, option):
    model, fused, given = pair
    for each in (model, fused):
        setattr(each.config, option, True)
    try:
        assert_recorded(model, fused, given, RECORDED[option])
    finally:
        for each in (model, fused):
            setattr(each.config, option, False)


@pytest.mark.parametrize("pair", ["gpt2", "vit"], indirect=True)
def test_a_call_is_fused_again_when_nothing_is_recorded(pair):
    model, fused, given = pair
    assert_recorded(model, fused, {**given, "output_attentions": True}, "attentions")
    before = fused.kfconvert_info()["guard"]["hits"]
    with torch.no_grad():
        fused(**given)
    assert fused.kfconvert_info()["guard"]["hits"] == before + 1
