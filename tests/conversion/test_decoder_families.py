"""The families of models with ``generate``: the tokens of the original, from recorded steps."""

from unittest import mock

import pytest
import torch
import transformers as hf
from support.selection import exhaustive

import kfconvert.conversion.pipeline
from kfconvert import ModelConverter
from kfconvert.capture import captured
from kfconvert.conversion import effort

MARKS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    **MARKS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BLOCKS = {**MARKS, "n_layer": 2, "n_head": 4}
ALTERNATING = ["sliding_attention", "full_attention"]
LATENT = {
    **SIZES, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "topk_group": 1, "n_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
STATES = {**MARKS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
SEQ2SEQ = {
    **MARKS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 3,
}  # fmt: skip
# The class of a model, the class of its configuration, and the configuration.
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**BLOCKS, "n_embd": 32, "n_positions": 128}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**WINDOW, "head_dim": 8, "layer_types": ALTERNATING}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**GROUPED, "head_dim": 8, **EXPERTS}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**BLOCKS, "n_embd": 32, "rotary_dim": 4, "n_positions": 128}),
    "falcon": ("FalconForCausalLM", "FalconConfig", SIZES),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {**SIZES, "alibi": True, "multi_query": False}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**BLOCKS, "hidden_size": 32}),
    "mpt": ("MptForCausalLM", "MptConfig", {**MARKS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", WINDOW),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig", {**WINDOW, "head_dim": 8, **LOCAL_EXPERTS, "layer_types": ALTERNATING}
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**GROUPED, **LOCAL_EXPERTS}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "glm": ("GlmForCausalLM", "GlmConfig", {**GROUPED, "head_dim": 8}),
    "mamba": ("MambaForCausalLM", "MambaConfig", STATES),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config", {**STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
    ),
    "jamba": (
        "JambaForCausalLM", "JambaConfig",
        {**GROUPED, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
         "num_experts": 4, "use_mamba_kernels": False},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {**GROUPED, "head_dim": 8, **EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": (
        "Lfm2ForCausalLM", "Lfm2Config",
        {**GROUPED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "block_ff_dim": 48},
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM", "FalconH1Config",
        {**GROUPED, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
         "mamba_d_state": 4, "mamba_chunk_size": 8},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "forced_eos_token_id": None}),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
    ),
}  # fmt: skip
# The models whose experts or scans have no float64.
IN_FLOAT32 = {
    "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "jamba", "mixtral", "qwen3_moe", "qwen3_next",
}  # fmt: skip
# The models whose steps run in transformers' loop: one overrides ``generate``, the other has no cache.
IN_OTHER_LOOP = {"mpt"}
# One with recurrent states and attention, and an encoder-decoder.
SHORT = ["lfm2"]
ALL = [*SHORT, *exhaustive(*(family for family in FAMILIES if family not in SHORT))]


@pytest.fixture(autouse=True)
def steps_on_the_cpu(monkeypatch):
    """As on a GPU, but for the recordings."""
    monkeypatch.setattr(kfconvert.conversion.pipeline, "can_record", lambda device: True)


def converted(family, inputs=None):
    kind, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, config)(**sizes)).eval()
    # Of random weights as they come, the next token is mostly the last one.
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 if parameter.dim() > 1 else parameter.data
    if family not in IN_FLOAT32:
        model.double()
    inputs = inputs or {"input_shape": (2, 6)}
    if family == "whisper":
        features = torch.randn(2, 8, 32, dtype=torch.float64)
        inputs = {"example_inputs": {"input_features": features, "decoder_input_ids": torch.tensor([[3, 5]] * 2)}}
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False, new_tokens=0)
    return model, converter.convert_model(model, **inputs)


def generated(model, inputs, **options):
    return model.generate(inputs, **{"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | options)


def conversation(model, ids):
    """The tokens of three turns, in which the cache goes on."""
    cache = None
    for turn in range(3):
        found = generated(model, ids, max_new_tokens=6, eos_token_id=None, return_dict_in_generate=True,
                          **({} if cache is None else {"past_key_values": cache}))  # fmt: skip
        cache, ids = found.past_key_values, torch.cat([found.sequences, torch.full((2, 3), 9 + turn)], 1)
    return ids


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("family", ALL)
def test_each_family_generates_the_tokens_of_the_original(family):
    model, fused = converted(family)
    torch.manual_seed(1)
    if family == "whisper":
        inputs = torch.randn(3, 8, 32, dtype=torch.float64)
    else:
        inputs = torch.randint(4, 64, (3, 7))
        mask = torch.ones_like(inputs)
        mask[0, :3] = inputs[0, :3] = 0
        assert torch.equal(generated(fused, inputs, attention_mask=mask), generated(model, inputs, attention_mask=mask))
    expected = generated(model, inputs[1:], eos_token_id=[2, *range(50, 54)])
    assert torch.equal(generated(fused, inputs[1:], eos_token_id=[2, *range(50, 54)]), expected)
    assert torch.equal(
        generated(fused, inputs[1:2], max_new_tokens=40), generated(model, inputs[1:2], max_new_tokens=40)
    )
    calls = 2 + (family != "whisper")
    if not (model.config.is_encoder_decoder or "mamba" in family or family == "mpt"):
        assert torch.equal(conversation(fused, inputs[1:]), conversation(model, inputs[1:]))
        calls += 3
    info = fused.kfconvert_info()
    if family in IN_OTHER_LOOP:
        # "fast" captures no calls with a padded prompt, and each call of MPT has the whole prompt.
        padded = 10 if family == "mpt" else 0
        assert info["guard"]["hits"] > 20 and sum(info["guard"]["misses"].values()) == padded
    else:
        assert info["generate"]["served"] == calls and not info["generate"]["others"]


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_whisper_never_generates_suppressed_tokens():
    model, fused = converted("whisper")
    features = torch.randn(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    free = generated(fused, features, eos_token_id=None)
    for each in (model, fused):
        each.generation_config.begin_suppress_tokens = [*set(free[:, 0].tolist()), 2]
        each.generation_config.suppress_tokens = [*set(free[:, 3].tolist()), 9]
    expected = generated(model, features, eos_token_id=None)
    assert torch.equal(generated(fused, features, eos_token_id=None), expected) and not torch.equal(free, expected)
    assert fused.kfconvert_info()["generate"] == {"served": 2, "others": {}, "sessions": 1}


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize(
    "family", ["gemma3", "lfm2", *exhaustive("deepseek_v3", "gpt_oss", "jamba", "qwen3_next", "t5")]
)
def test_repeated_layers_generate_the_tokens_of_the_original(family, monkeypatch):
    """Some of the layers are traced, and have a window, a cache or experts where others do not."""
    monkeypatch.setattr(effort, "LEAST_FOR_CAPTURES", 60.0)  # for a slow machine
    kind, config, sizes = FAMILIES[family]
    deep = {name: 8 for name in ("num_hidden_layers", "num_layers") if name in sizes}
    deep |= {"layer_types": sizes["layer_types"] * 4} if "layer_types" in sizes else {}
    monkeypatch.setitem(FAMILIES, family, (kind, config, sizes | deep))
    with mock.patch.object(captured, "repeat", wraps=captured.repeat) as repeat:
        model, fused = converted(family)
    assert repeat.call_count >= 2
    ids = torch.randint(4, 64, (2, 14), generator=torch.Generator().manual_seed(1))
    assert torch.equal(generated(fused, ids, eos_token_id=None), generated(model, ids, eos_token_id=None))
    assert fused.kfconvert_info()["generate"]["served"] == 1


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("steps", exhaustive("recorded", "growing"))
def test_an_example_longer_than_the_window(steps, monkeypatch):
    if steps == "growing":
        monkeypatch.setattr(kfconvert.conversion.pipeline, "can_record", lambda device: False)
    model, fused = converted("gemma3", {"input_shape": (2, 20)})
    for length in (14, 30):
        ids = torch.randint(4, 64, (3, length))
        assert torch.equal(generated(fused, ids), generated(model, ids))
    info = fused.kfconvert_info()
    assert not info["guard"]["misses"] and info["guard"]["hits"] == (2 if steps == "recorded" else 20)
    assert (info["generate"] or {"served": 0})["served"] == (2 if steps == "recorded" else 0)


@pytest.mark.exhaustive
def test_beams_by_default_have_programs_for_growing_caches():
    kind, config, sizes = FAMILIES["bart"]
    model = getattr(hf, kind)(getattr(hf, config)(**sizes)).double().eval()
    model.generation_config.num_beams = 3
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False, new_tokens=0)
    fused, ids = converter.convert_model(model, input_shape=(2, 6)), torch.randint(4, 64, (2, 7))
    assert torch.equal(generated(fused, ids), generated(model, ids))
    guard = fused.kfconvert_info()["guard"]
    assert guard["hits"] >= 5 and not guard["misses"]
