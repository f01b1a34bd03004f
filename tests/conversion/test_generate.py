"""``generate`` of a converted model over a static cache: token for token what transformers makes, in float64."""

import copy
import functools
import inspect
import pickle
import threading

import pytest
import torch
import transformers as hf
from support.selection import exhaustive

import kfconvert.conversion.pipeline
from kfconvert import ModelConverter
from kfconvert.generation import decoding, request

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=256, pad_token_id=0, bos_token_id=1,
                      eos_token_id=2)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=12)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES, head_dim=8)),
}  # fmt: skip
SOME_FAMILIES = ["gpt2", "llama", *exhaustive("mistral", "qwen3", "gemma")]
# Arguments of generate, each of which is served by a program.
SERVED = {
    "greedy": {}, "by one token more than two": {"max_new_tokens": 3}, "padded at the left": {"padded": True},
    "ends": {"max_new_tokens": 40, "eos_token_id": [*range(20, 40)]},
    "least": {"min_new_tokens": 6, "eos_token_id": [*range(20, 40)]},
    "least length": {"min_length": 14, "eos_token_id": [*range(20, 40)]},
    "repetition penalty": {"repetition_penalty": 1.3}, "sampling": {"do_sample": True},
    "top-k": {"do_sample": True, "temperature": 0.7, "top_k": 10},
    "top-p": {"do_sample": True, "top_p": 0.8, "max_new_tokens": 40},
    "several": {"do_sample": True, "num_return_sequences": 2}, "least time": {"max_time": 100.0},
}  # fmt: skip
# Arguments that transformers' own loop serves, and what is told of them.
OTHERS = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "more than tokens"),
    "a processor": ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
    "a static cache of transformers": ({"cache_implementation": "static"}, "cache_implementation"),
    "a single token": ({"max_new_tokens": 1}, "single token"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
}


@pytest.fixture(autouse=True)
def steps_on_the_cpu(monkeypatch):
    """As on a GPU, but for the recordings."""
    monkeypatch.setattr(kfconvert.conversion.pipeline, "can_record", lambda device: True)


_pairs = {}


def pair(family, device="cpu"):
    """A model and its conversion, of which a test takes copies where it changes them."""
    if (family, device) not in _pairs:
        torch.manual_seed(0)
        model = FAMILIES[family]().double().eval().to(device)
        # "fast" captures the calls that generate() makes only, which takes half as long.
        effort = "full" if family == "llama" else "fast"
        converter = ModelConverter(select="all", new_tokens=0, effort=effort, validate_accuracy=False)
        fused = converter.convert_model(model, input_shape=(2, 6))
        assert "generate" in vars(fused)
        _pairs[family, device] = model, fused
    return _pairs[family, device]


def generated(model, padded=False, batch=3, length=9, **arguments):
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (batch, length)).to(model.device)
    if padded:
        ids[0, :4] = 0
        arguments["attention_mask"] = (ids != 0).long()
    tokens = model.generate(ids, **{"max_new_tokens": 8, "do_sample": False} | arguments)
    return (tokens if isinstance(tokens, torch.Tensor) else tokens.sequences), torch.rand(2, device=model.device)


def assert_same(model, fused, **arguments):
    for one, other in zip(generated(fused, **arguments), generated(model, **arguments)):
        assert torch.equal(one, other)


def served(fused):
    return fused.kfconvert_info()["generate"]["served"]


@pytest.mark.parametrize("arguments", SERVED)
@pytest.mark.parametrize("family", SOME_FAMILIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_tokens_are_those_of_the_original(device, family, arguments):
    model, fused = pair(family, device)
    before = served(fused)
    assert_same(model, fused, **SERVED[arguments])
    assert_same(model, fused, batch=1, **{"min_new_tokens": 2} | SERVED[arguments])
    assert served(fused) == before + 2


def test_tensors_of_processors_are_read_once(monkeypatch):
    """A read waits for the device, so the launches of further steps would be late."""
    _, fused = pair("llama")
    described, calls = request._described, []
    monkeypatch.setattr(request, "_described", lambda processor: calls.append(processor) or described(processor))
    generated(fused, max_new_tokens=40, min_new_tokens=40, eos_token_id=[5, 6])
    assert calls and len(calls) == len(set(map(id, calls)))


def negated(module, args, outputs):
    outputs.logits = -outputs.logits
    return outputs


def shifted(module, args, kwargs):
    return args, kwargs | {"input_ids": (kwargs["input_ids"] + 1) % 64}


@pytest.mark.parametrize("register", [
    lambda model: model.register_forward_hook(negated),
    lambda model: model.register_forward_pre_hook(shifted, with_kwargs=True),
])  # fmt: skip
def test_hooks_of_the_model_itself_are_called_in_each_step(register):
    model, fused = pair("gpt2")
    handles = [register(each) for each in (model, fused)]
    try:
        before = served(fused)
        assert_same(model, fused)
        assert served(fused) == before
    finally:
        for handle in handles:
            handle.remove()
    assert_same(model, fused)
    assert served(fused) == before + 1


def other_tokens(model, ids, *args, **kwargs):
    made = type(model).prepare_inputs_for_generation(model, ids, *args, **kwargs)
    return made | {"input_ids": (made["input_ids"] + 3) % 64}


@pytest.mark.parametrize("place", ["instance", "class"])
def test_methods_of_the_loop_that_are_others_are_called(monkeypatch, place):
    model, fused = pair("llama")
    before = served(fused)
    for each in (model, fused):
        if place == "instance":  # as peft does for prompts that are learnt
            monkeypatch.setitem(vars(each), "prepare_inputs_for_generation", functools.partial(other_tokens, each))
    if place == "class":
        own = hf.GenerationMixin._prefill
        wrapped = functools.wraps(own)(lambda self, ids, *args, **kwargs: own(self, (ids + 1) % 64, *args, **kwargs))
        monkeypatch.setattr(hf.GenerationMixin, "_prefill", wrapped)
    assert_same(model, fused)
    assert served(fused) == before


class EosTokenCriteria(hf.StoppingCriteria):
    """Not that of transformers."""

    def __call__(self, ids, scores, **kwargs):
        return ids[:, -1] > 50


class WithEnds(hf.StoppingCriteria):
    eos_token_id = torch.tensor([30])

    def __call__(self, ids, scores, **kwargs):
        return (ids[:, -1] >= 20) & (ids[:, -1] < 40)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"stopping_criteria": [EosTokenCriteria()]},
        lambda: {"stopping_criteria": [WithEnds()], "eos_token_id": None},
        lambda: {
            "logits_processor": [hf.MinLengthLogitsProcessor(25, eos_token_id=[*range(3, 15)])],
            "min_new_tokens": 2,
            "eos_token_id": [*range(20, 40)],
        },
    ],
    ids=["a name of transformers", "ends of its own", "two lengths"],
)
def test_criteria_and_processors_that_look_like_known_ones(arguments):
    model, fused = pair("llama")
    config = model.generation_config.eos_token_id
    try:
        for each in (model, fused):
            each.generation_config.eos_token_id = None if "eos_token_id" in arguments() else config
        for one, other in zip(*(generated(each, max_new_tokens=20, **arguments()) for each in (fused, model))):
            assert torch.equal(one, other)
    finally:
        for each in (model, fused):
            each.generation_config.eos_token_id = config


def test_scores_that_are_no_numbers_are_not_drawn_by():
    model, fused = (copy.deepcopy(each) for each in pair("gpt2"))
    with torch.no_grad():
        for each in (model, fused):
            each.get_output_embeddings().weight[7, 0] = float("nan")
    for each in (model, fused):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            generated(each, do_sample=True)
    assert_same(model, fused)  # greedily, the largest is chosen


def test_scores_that_are_equal_in_float32_are_equal():
    model, fused = (copy.deepcopy(each) for each in pair("gpt2"))
    with torch.no_grad():
        for each in (model, fused):
            words = each.get_output_embeddings().weight
            words[33:64] = words[2:33] * (1 + 1e-12)
    assert_same(model, fused, max_new_tokens=16)
    assert served(fused) == 1


@pytest.mark.parametrize("arguments", OTHERS)
def test_other_arguments_are_served_by_transformers(arguments):
    model, fused = pair("gpt2")
    before = served(fused)
    given, reason = OTHERS[arguments]
    assert_same(model, fused, batch=1, **given)
    assert served(fused) == before
    assert any(reason in told for told in fused.kfconvert_info()["generate"]["others"])


@pytest.mark.parametrize("family", ["gpt2", *exhaustive("mistral")])
@pytest.mark.parametrize("ends", [None, [*range(20, 40)]])
def test_a_cache_goes_on_in_the_next_turn(family, ends):
    """With more tokens than the window of a model that has one."""
    model, fused = pair(family)
    before, found = served(fused), []
    for each in (model, fused):
        cache, torch_ids = hf.DynamicCache(config=each.config), torch.arange(3, 21).view(2, 9)
        for _ in range(2):
            tokens = each.generate(torch_ids, past_key_values=cache, max_new_tokens=7, eos_token_id=ends)
            torch_ids = torch.cat([tokens, torch.arange(40, 46).view(2, 3)], 1)
        returned = each.generate(torch_ids, max_new_tokens=5, return_dict_in_generate=True)
        found.append((torch_ids, returned, [cache, returned.past_key_values]))
    (ids, returned, caches), (others, other, theirs) = found
    assert torch.equal(ids, others) and torch.equal(returned.sequences, other.sequences)
    assert returned.keys() == other.keys() and type(returned) is type(other)
    for one, two in zip(caches, theirs):
        assert one.get_seq_length() == two.get_seq_length() and len(one.layers) == len(two.layers)
        for layer, twin in zip(one.layers, two.layers):
            assert vars(layer).keys() == vars(twin).keys()
            torch.testing.assert_close((layer.keys, layer.values), (twin.keys, twin.values))
    assert served(fused) == before + 3


class Heard:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens.append(tokens.tolist())

    def end(self):
        self.tokens.append("end")


class Sees(hf.StoppingCriteria):
    """Ends a row at a multiple of a number, and keeps what it is asked about."""

    def __init__(self, number):
        self.number, self.seen = number, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores))
        return input_ids[:, -1] % self.number == 0


@pytest.mark.parametrize("arguments", ["greedy", "ends", "sampling", "padded at the left"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_streamers_and_criteria_get_each_token(device, arguments):
    model, fused = pair("llama", device)
    before = served(fused)
    told = []
    for each in (fused, model):
        streamer, criterion = Heard(), Sees(5)
        more = SERVED[arguments] | {"streamer": streamer, "stopping_criteria": [criterion], "max_new_tokens": 12}
        told.append((generated(each, **more)[0].tolist(), streamer.tokens, criterion.seen))
        assert len(streamer.tokens) > 3
    assert told[0] == told[1]
    assert served(fused) == before + 1


class Forces(hf.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        input_ids[:, -1] = 7 + input_ids.shape[1] % 3
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_criterion_may_write_tokens():
    model, fused = pair("llama")
    assert_same(model, fused, batch=1, stopping_criteria=[Forces()])


def test_a_model_that_changes_after_a_streamer_has_heard_tokens():
    fused = copy.deepcopy(pair("llama")[1])

    class Changes(Heard):
        def put(self, tokens):
            super().put(tokens)
            if len(self.tokens) == 4:
                fused.model.norm.register_forward_hook(lambda module, given, output: None)

    heard = Changes()
    with pytest.raises(
        RuntimeError, match="cannot continue, because a streamer or criterion has already received tokens: .* hooks"
    ):
        generated(fused, streamer=heard)
    assert len(heard.tokens) == 4


def test_streamers_by_place_and_kept_tokens():
    model, fused = pair("llama")
    kept = []
    for each in (fused, model):
        heard = Heard()
        heard.put = heard.tokens.append
        ids = torch.arange(3, 9).view(1, 6)
        config = copy.deepcopy(each.generation_config)
        config.max_new_tokens, config.do_sample = 5, False
        each.generate(ids, config, None, None, None, None, None, heard)
        generated(each, streamer=heard, batch=1)
        generated(each, batch=1, length=4)
        kept.append([tokens if isinstance(tokens, str) else tokens.tolist() for tokens in heard.tokens])
    assert kept[0] == kept[1]


def test_a_streamer_may_generate_itself():
    model, fused = pair("llama")

    class Asks(Heard):
        def put(self, tokens):
            super().put(tokens)
            self.tokens.append(generated(fused, batch=1, max_new_tokens=3)[0].tolist())

    heard, expected = Asks(), Heard()
    assert torch.equal(generated(fused, streamer=heard)[0], generated(model, streamer=expected)[0])
    assert [tokens for tokens in heard.tokens[::2] if tokens != "end"] == expected.tokens[:-1]
    assert any("another call" in reason for reason in fused.kfconvert_info()["generate"]["others"])


def test_a_streamer_may_wait_for_another_thread():
    model, fused = pair("llama")
    found = []

    class Waits(Heard):
        def put(self, tokens):
            super().put(tokens)
            if len(self.tokens) == 3:
                thread = threading.Thread(target=lambda: found.append(generated(fused, batch=1)[0]), daemon=True)
                thread.start()
                thread.join(timeout=60)

    generated(fused, streamer=Waits())
    assert len(found) == 1 and torch.equal(found[0], generated(model, batch=1)[0])


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_cache_grows(device, family, monkeypatch):
    """Past the first capacity, and past the window of a model that has one."""
    monkeypatch.setattr(decoding, "FIRST_ROOM", 8)
    model, fused = pair(family, device)
    for arguments in ({}, {"padded": True}, {"do_sample": True}, {"repetition_penalty": 1.2}):
        assert_same(model, fused, max_new_tokens=60, **arguments)
    assert_same(model, fused, length=40, max_new_tokens=100)


def test_an_example_with_a_mask_adds_padded_prompts():
    torch.manual_seed(0)
    model = FAMILIES["llama"]().double().eval()
    ids = torch.randint(3, 64, (2, 6))
    ids[0, :3] = model.generation_config.pad_token_id
    example = {"input_ids": ids, "attention_mask": (ids != ids[0, 0]).long()}
    fused = ModelConverter(select="all", effort="fast", new_tokens=0).convert_model(model, example_inputs=example)
    for padded in (True, False):
        assert_same(model, fused, padded=padded)
    assert not fused.kfconvert_info()["guard"]["misses"]


@pytest.mark.cuda
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_prompts_of_one_length_are_replayed(family):
    model, fused = pair(family, "cuda")
    before = fused.kfconvert_info()["cuda_graphs"]["replayed"]
    for _ in range(4):
        assert_same(model, fused, length=8)
        assert_same(model, fused, length=8, padded=True)
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] >= before + 4


def test_only_some_caches_are_kept():
    _, fused = pair("gpt2")
    for batch in range(1, decoding.MOST_SESSIONS + 3):
        generated(fused, batch=batch)
    assert fused.kfconvert_info()["generate"]["sessions"] == decoding.MOST_SESSIONS


CHANGES = {
    "weights": lambda model: model.get_output_embeddings().weight.data.neg_(),
    "a hook": lambda model: model.transformer.ln_f.register_forward_hook(lambda m, a, output: output * 2),
    "training": lambda model: model.train(),
    "the pad token": lambda model: setattr(model.generation_config, "pad_token_id", 5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_changes_of_the_model_are_seen(change):
    model, fused = copy.deepcopy(pair("gpt2"))
    assert_same(model, fused)
    for each in (model, fused):
        torch.manual_seed(3)
        CHANGES[change](each)
    fused.kfconvert_refresh()
    assert_same(model, fused, eos_token_id=[*range(20, 40)])


def test_a_change_while_tokens_are_made_is_seen(monkeypatch):
    """As by another thread: it begins again with the original's loop."""
    model, fused = copy.deepcopy(pair("gpt2"))
    own, calls = decoding.Generate._ready, []

    def changed(self, converted, session):
        calls.append(True)
        if len(calls) == 4:
            converted.transformer.ln_f.eps = 0.5
        return own(self, converted, session)

    monkeypatch.setattr(decoding.Generate, "_ready", changed)
    for sampled in (False, True):
        del calls[:]
        fused.transformer.ln_f.eps = 1e-5
        before, ours = served(fused), generated(fused, do_sample=sampled)
        assert served(fused) == before
        model.transformer.ln_f.eps = 0.5
        for one, other in zip(ours, generated(model, do_sample=sampled)):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_copies_and_pickles_generate():
    model, fused = pair("gpt2")
    twin = copy.deepcopy(fused)
    assert_same(model, twin)
    assert served(twin)
    for each in (fused, twin):  # what help() and an editor show
        assert inspect.signature(each.generate) == inspect.signature(model.generate)
        assert each.generate.__doc__ == model.generate.__doc__
    assert_same(model, copy.copy(fused))
    assert "generate" not in vars(copy.copy(fused))
    assert_same(model, pickle.loads(pickle.dumps(fused)))


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "generate"])
def test_a_class_with_a_loop_of_its_own_keeps_it(name):
    def own(self, input_ids, **kwargs):
        return getattr(hf.GPT2LMHeadModel, name)(self, input_ids, **kwargs)

    model, fused = copy.deepcopy(pair("gpt2"))
    for each in (model, fused):
        each.__class__ = type("Own", (hf.GPT2LMHeadModel,), {name: own})
    assert_same(model, fused)
    assert fused.kfconvert_info()["generate"]["others"] == {f"it overrides {name}": 1}
