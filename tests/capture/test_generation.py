"""Models with key-value caches, captured as a whole: what they return, make of a cache, and generate."""

import copy
import functools

import pytest
import torch
import transformers as hf
from support.selection import exhaustive

from kfconvert import ModelConverter

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
SHALLOW = {**GROUPED, "num_hidden_layers": 1}
SEQ2SEQ = dict(
    vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
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
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHALLOW, num_local_experts=4)),
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
# One with learned positions, one with rotations, grouped heads and a window, and an encoder-decoder.
SHORT = ["mistral", "bart"]
ALL = [*SHORT, *exhaustive(*(family for family in FAMILIES if family not in SHORT))]
# Norms and rotations are computed in float32 by some models whatever their own dtype is.
IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
ARGUMENTS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "penalty": {"repetition_penalty": 1.5},
    "least": {"min_new_tokens": 8},
    "a processor": {"no_repeat_ngram_size": 2},
}


@functools.cache
def converted(family):
    """The model, and its conversion."""
    dtype = dtype_of(family)
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    # Of random weights as they come, the next token is mostly the last one.
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 if parameter.dim() > 1 else parameter.data
    inputs = {"input_shape": (2, 9)}
    if family == "whisper":
        features = torch.randn(2, 8, 32, dtype=dtype)
        inputs = {"example_inputs": {"input_features": features, "decoder_input_ids": torch.tensor([[3, 5]] * 2)}}
    # "fast" captures fewer call forms: for an encoder-decoder the prompt and the step, each with and without a mask.
    effort = "fast" if family == "bart" else "full"
    converter = ModelConverter(select="all", effort=effort, validate_accuracy=False, new_tokens=0)
    fused = converter.convert_model(model, **inputs)
    assert converter.conversion_stats["total_replaced"] > 0 and converter.conversion_stats["generates"]
    return model, fused


def separate(family):
    """The same with a copy of the converted model, whose misses count for one test only."""
    model, fused = converted(family)
    return model, copy.deepcopy(fused)


def dtype_of(family):
    """The experts of Mixtral are not computed in float64."""
    return torch.float32 if family == "mixtral" else torch.float64


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
@pytest.mark.parametrize("family", ALL)
def test_generate_gives_the_tokens_of_the_original_by_programs(family, arguments):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family)
    expected = generated(model, inputs, **ARGUMENTS[arguments])
    assert torch.equal(generated(fused, inputs, **ARGUMENTS[arguments]), expected)
    assert served(fused, before) >= 5


@pytest.mark.parametrize("family", [family for family in ALL if getattr(family, "values", None) != ("whisper",)])
def test_prompts_of_other_lengths_may_be_padded_at_the_left(family):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=3, length=8)
    mask = torch.ones_like(inputs)
    mask[0, :3] = mask[1, :1] = 0
    inputs[mask == 0] = 0
    expected = generated(model, inputs, attention_mask=mask)
    assert torch.equal(generated(fused, inputs, attention_mask=mask), expected)
    assert served(fused, before) >= 5


@pytest.mark.parametrize("family", ALL)
def test_rows_may_end_before_others(family):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=3)
    end = generated(model, inputs)[0, -5].item()
    expected = generated(model, inputs, eos_token_id=end)
    assert torch.equal(generated(fused, inputs, eos_token_id=end), expected)
    assert (expected == end).any() or expected.shape[1] < 9  # Whisper takes it off
    assert served(fused, before) > 0


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("family", ALL)
def test_assisted_generation_gives_the_tokens_of_the_original(family):
    model, fused = converted(family)
    inputs, fused = prompt(family, batch=1, length=3), copy.deepcopy(fused)
    # The calls in which a model judges several tokens of its assistant are the original's.
    options = {"assistant_model": copy.deepcopy(model), "num_assistant_tokens": 2}
    assert torch.equal(generated(fused, inputs, **options), generated(model, inputs, **options))


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_one_prompt_may_be_of_one_token(family):
    model, fused = converted(family)
    before, inputs = served(fused), prompt(family, batch=1, length=1)
    assert torch.equal(generated(fused, inputs), generated(model, inputs))
    assert served(fused, before) >= 5


def filled(model, ids):
    """What ``generate`` passes for the next token, after ``ids``: a cache that the original has filled."""
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def step(model, cache, batch=2):
    torch.manual_seed(3)
    position = torch.full((batch, 1), cache.get_seq_length())
    given = {"input_ids": torch.randint(4, 64, (batch, 1)), "past_key_values": cache, "position_ids": position}
    with torch.no_grad():
        return model(**given, logits_to_keep=1, use_cache=True, return_dict=True)


def assert_same(cache, other):
    for ours, theirs in zip((cache, *cache.layers), (other, *other.layers), strict=True):
        assert type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys()
        for name in vars(ours).keys() - {"layers"}:
            if isinstance(vars(ours)[name], torch.Tensor):
                torch.testing.assert_close(vars(ours)[name], vars(theirs)[name], **IN_FLOAT32)
            else:
                assert vars(ours)[name] == vars(theirs)[name]


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_call_without_a_cache_returns_one_as_the_original_would(family):
    model, fused = converted(family)
    before, ids = served(fused), prompt(family)
    with torch.no_grad():
        ours, theirs = fused(ids).past_key_values, model(ids).past_key_values
    assert served(fused, before) == 1
    assert_same(ours, theirs)
    # Each takes the cache of the other.
    torch.testing.assert_close(step(model, ours).logits, step(fused, theirs).logits, **IN_FLOAT32)
    assert served(fused, before) == 2


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_step_writes_to_the_cache_that_it_is_given_and_returns_it(family):
    model, fused = converted(family)
    before, cache = served(fused), filled(model, prompt(family))
    expected, layers = step(model, filled(model, prompt(family))), list(cache.layers)
    keys = layers[0].keys
    outputs = step(fused, cache)
    assert served(fused, before) == 1 and outputs.past_key_values is cache
    assert [*map(id, cache.layers)] == [*map(id, layers)] and keys.shape[-2] == 6 and cache.get_seq_length() == 7
    assert_same(cache, expected.past_key_values)
    torch.testing.assert_close(outputs.logits, expected.logits, **IN_FLOAT32)


def test_the_flags_of_a_cache_stay_in_the_dict_in_which_they_are():
    model, fused = converted("bart")
    before, found = served(fused), []
    for each in (model, fused):
        halves = [hf.DynamicCache(config=each.config.get_text_config(decoder=True)) for _ in range(2)]
        cache, held = hf.EncoderDecoderCache(*halves), []
        flags = cache.is_updated
        with torch.no_grad():
            given = {"encoder_outputs": each.get_encoder()(prompt("bart")), "past_key_values": cache}
            for token in (5, 6):
                each(decoder_input_ids=torch.full((2, 1), token), **given, use_cache=True, return_dict=True)
                held.append(dict(flags))
        found.append(held)
        assert flags is cache.is_updated
    assert found[0] == found[1] and found[0][0] == {0: True}
    assert served(fused, before) == 2


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_a_program_that_is_not_taken_leaves_the_cache_to_the_original():
    model, fused = separate("gpt2")
    cache = filled(model, prompt("gpt2"))
    with torch.no_grad():
        outputs = fused(torch.tensor([[5], [6]]), past_key_values=cache, output_attentions=True)
    assert outputs.past_key_values is cache and cache.get_seq_length() == 7


class OtherLayer(hf.cache_utils.DynamicLayer):
    """Its keys are those of the usual class, for all that anybody knows."""


def with_another_layer(cache):
    layer = object.__new__(OtherLayer)
    vars(layer).update(vars(cache.layers[0]))
    cache.layers[0] = layer


def with_one_tensor_twice(cache):
    cache.layers[1].keys = cache.layers[0].keys


def of_another_length(cache):
    cache.layers[1].crop(-1)


CHANGES = [with_another_layer, with_one_tensor_twice, of_another_length]


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_of_another_kind_than_those_of_generate_goes_to_the_original(change):
    model, fused = separate("gpt2")
    found = []
    for each in (model, fused):
        cache = filled(model, prompt("gpt2"))
        change(cache)
        guard = fused.kfconvert_info()["guard"]
        try:
            found.append(step(each, cache).logits)
        except RuntimeError as error:
            found.append(str(error))
    after = fused.kfconvert_info()["guard"]
    assert after["hits"] == guard["hits"] and sum(after["misses"].values()) == sum(guard["misses"].values()) + 1
    assert found[0] == found[1] if isinstance(found[0], str) else torch.allclose(*found, atol=1e-12)


def test_a_window_that_is_left_behind_goes_to_the_original():
    config = hf.MistralConfig(**{**SHALLOW, "sliding_window": 12})
    model = hf.MistralForCausalLM(config).double().eval()
    converter = ModelConverter(select="all", effort="fast", validate_accuracy=False, new_tokens=0)
    fused, ids = converter.convert_model(model, input_shape=(2, 6)), prompt("mistral")
    with pytest.warns(RuntimeWarning, match="runs its original forward"):
        assert torch.equal(generated(fused, ids, max_new_tokens=20), generated(model, ids, max_new_tokens=20))
    guard = fused.kfconvert_info()["guard"]
    assert guard["hits"] >= 3 and sum(guard["misses"].values()) >= 8


def test_an_example_may_hold_a_cache_which_stays_as_it_is():
    model, _ = converted("gpt2")
    cache = filled(model, prompt("gpt2"))
    given = {"input_ids": torch.tensor([[5], [6]]), "past_key_values": cache}
    converter = ModelConverter(select="all", effort="fast", new_tokens=0)
    fused = converter.convert_model(model, example_inputs=given)
    assert converter.conversion_stats["accuracy"]["passed"] and cache.get_seq_length() == 6
    with torch.no_grad():
        expected = model(given["input_ids"], past_key_values=filled(model, prompt("gpt2")))
        outputs = fused(**given)
    torch.testing.assert_close(outputs.logits, expected.logits)
    assert served(fused) == 1 and outputs.past_key_values is cache and cache.get_seq_length() == 7


def test_fast_effort_serves_an_encoder_decoder_with_a_mask():
    model, fused = converted("bart")
    ids = prompt("bart")
    for mask in ({}, {"attention_mask": torch.ones_like(ids)}):
        before = served(fused)
        expected = generated(model, ids, max_new_tokens=4, **mask)
        assert torch.equal(generated(fused, ids, max_new_tokens=4, **mask), expected)
        assert served(fused, before) == 4
