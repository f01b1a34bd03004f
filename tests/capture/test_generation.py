"""Models with key-value caches, captured as a whole: what they return, make of a cache, and generate."""

import functools

import pytest
import torch
import transformers as hf

from kfconvert import ModelConverter

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
SHALLOW = {**GROUPED, "num_hidden_layers": 1}
SEQ2SEQ = dict(
    vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
)  # fmt: skip
FAMILIES = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=64, pad_token_id=0, bos_token_id=1,
                      eos_token_id=2)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHALLOW)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHALLOW)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHALLOW, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SHALLOW, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(**SEQ2SEQ, max_position_embeddings=64, forced_eos_token_id=None)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=32)
    ),
}  # fmt: skip
ARGUMENTS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "penalty": {"repetition_penalty": 1.5},
    "least": {"min_new_tokens": 8},
}


@functools.cache
def converted(family, dtype=torch.float64):
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    # Of random weights as they come, the next token is mostly the last one.
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 if parameter.dim() > 1 else parameter.data
    inputs = {"input_shape": (2, 9)}
    if family == "whisper":
        features = torch.randn(2, 8, 32, dtype=dtype)
        inputs = {"example_inputs": {"input_features": features, "decoder_input_ids": torch.tensor([[3, 5]] * 2)}}
    converter = ModelConverter(select="all", validate_accuracy=False)
    fused = converter.convert_model(model, **inputs)
    assert converter.conversion_stats["total_replaced"] > 0 and converter.conversion_stats["generates"]
    return model, fused


def prompt(family, batch=2, length=6, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(batch, 8, 32, dtype=dtype) if family == "whisper" else torch.randint(4, 64, (batch, length))


def generated(model, inputs, **options):
    torch.manual_seed(2)
    return model.generate(inputs, **{"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0} | options)


def served(fused, before=None):
    """The calls that programs have served (since ``before``); none went its original way."""
    guard = fused.kfconvert_info()["guard"]
    assert guard["misses"] == {}
    return guard["hits"] - (before or 0)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_of_the_original_by_programs(family, arguments):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family)
    expected = generated(model, inputs, **ARGUMENTS[arguments])
    assert torch.equal(generated(fused, inputs, **ARGUMENTS[arguments]), expected)
    assert served(fused, before) >= 5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "whisper"])
def test_prompts_of_other_lengths_may_be_padded_at_the_left(family):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=3, length=8)
    mask = torch.ones_like(inputs)
    mask[0, :3] = mask[1, :1] = 0
    inputs[mask == 0] = 0
    expected = generated(model, inputs, attention_mask=mask)
    assert torch.equal(generated(fused, inputs, attention_mask=mask), expected)
    assert served(fused, before) >= 5


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_rows_may_end_before_others(family):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=3)
    end = generated(model, inputs)[0, -5].item()
    expected = generated(model, inputs, eos_token_id=end)
    assert torch.equal(generated(fused, inputs, eos_token_id=end), expected) and (expected == end).any()
    assert served(fused, before) > 0


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_one_prompt_may_be_of_one_token(family, length):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=1, length=length)
    assert torch.equal(generated(fused, inputs), generated(model, inputs))
    assert served(fused, before) >= 5
